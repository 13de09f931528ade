"""The selected tree is the best one, for every budget, and the same from a table and on demand."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.proposal import FrontierProposal, TableProposal
from treeflash.types import Limits, Transitions

TIES = [0.0, 0.0, -0.5, -0.5, -1.0, -1.5, -2.25, -math.inf]


@st.composite
def tables(draw, max_depth=3, max_contexts=2, max_children=3):
    """Transitions with ties, log-probabilities of 0 and a rounding above, and impossible children.

    Children stand by falling probability, as they should, or in any order.
    """
    depth = draw(st.integers(1, max_depth))
    contexts = draw(st.integers(1, max_contexts))
    children = draw(st.integers(1, max_children))
    shape = (1, depth, contexts, children)
    count = math.prod(shape)
    values = st.sampled_from([*TIES, 1e-7]) | st.floats(-4, 0, width=32)
    log_probs = torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), dtype=torch.float32)
    log_probs = log_probs.view(shape)
    if draw(st.booleans()):
        log_probs = log_probs.sort(dim=-1, descending=True).values
    following = draw(st.lists(st.integers(-1, contexts - 1), min_size=count, max_size=count))
    next_context = torch.tensor(following).view(shape)
    next_context[:, -1] = -1
    token_ids = torch.arange(children).expand(shape)
    return Transitions(token_ids, log_probs, next_context)


def all_nodes(table):
    """Every node of a table as its path of child indices, with its log-weight summed in float32."""
    found = {(): (torch.tensor(0.0), 0)}
    level = [()]
    for depth in range(table.token_ids.shape[1]):
        below = []
        for path in level:
            weight, context = found[path]
            if context < 0:
                continue
            for child in range(table.token_ids.shape[3]):
                log_prob = table.log_probs[0, depth, context, child].clamp(max=0)
                if log_prob > -math.inf:
                    following = int(table.next_context[0, depth, context, child])
                    found[(*path, child)] = (weight + log_prob, following)
                    below.append((*path, child))
        level = below
    del found[()]
    return {path: float(weight) for path, (weight, _) in found.items()}


def expected_length(weights):
    return sum(math.exp(weight) for weight in weights)


def best_by_brute_force(nodes, budget):
    """The greatest expected length over all prefix-closed sets of at most `budget` nodes."""
    best = 0.0
    for size in range(1, budget + 1):
        for chosen in itertools.combinations(nodes, size):
            kept = {*chosen, ()}
            if all(path[:-1] in kept for path in chosen):
                best = max(best, expected_length(nodes[path] for path in chosen))
    return best


def select(table, budget, **options):
    proposal = TableProposal(torch.tensor([99]), table)
    limits = Limits(nodes=budget, depth=table.token_ids.shape[1])
    tree = OptTree(budget, **options).select(proposal, limits)
    tree.validate()
    return tree


@given(table=tables(max_depth=2), budget=st.integers(1, 4))
def test_optimal_by_brute_force(table, budget):
    nodes = all_nodes(table)
    tree = select(table, budget)
    found = expected_length(nodes[path] for path in tree.paths())
    assert found == pytest.approx(best_by_brute_force(nodes, budget), abs=1e-6)
    assert int(tree.num_nodes[0]) - 1 == min(budget, len(nodes))


@given(table=tables(max_depth=5, max_contexts=4, max_children=5), budget=st.integers(1, 40))
def test_first_n_nodes_are_the_heaviest_n(table, budget):
    """Weights never grow along a path: so the heaviest nodes are the optimum, for every n at once."""
    nodes = sorted(all_nodes(table).values(), reverse=True)
    tree = select(table, budget)
    weights = tree.log_weights[0, 1 : int(tree.num_nodes[0])].tolist()
    assert weights == pytest.approx(nodes[:budget], abs=1e-6)
    for count in range(1, int(tree.num_nodes[0]) + 1):
        tree.first(count).validate()


@given(table=tables(max_depth=4, max_contexts=1, max_children=4), budget=st.integers(1, 20))
def test_frontier_form_agrees_with_the_table(table, budget):
    """One context a depth answers alike whether it is looked up or asked for."""
    table.next_context[:, :-1] = 0

    def refine(slots, contexts):
        assert contexts.shape[2] == 0
        return table.token_ids[:, slots, 0], table.log_probs[:, slots, 0]

    depth = table.token_ids.shape[1]
    asked = FrontierProposal(torch.tensor([[98, 99]]), depth, 0, refine)
    limits = Limits(nodes=budget, depth=depth)
    tree, other = select(table, budget), OptTree(budget).select(asked, limits)
    assert tree.paths() == other.paths()
    assert torch.equal(tree.log_weights, other.log_weights)


@pytest.mark.parametrize("history", [1, 2])
@given(seed=st.integers(0, 1000), budget=st.integers(1, 30))
def test_frontier_contexts_are_the_tokens_of_the_path(history, seed, budget):
    """What a refiner is asked about is spelled out by the node's own path."""
    vocabulary, depth = 5, 4
    scores = torch.randn(vocabulary, vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed))
    log_probs = scores.log_softmax(-1)
    recent = torch.tensor([[3, 4]])

    def refine(slots, contexts):
        older = contexts[..., 0] if history == 2 else torch.zeros_like(contexts[..., 0])
        found, ids = log_probs[older, contexts[..., -1]].sort(descending=True)
        return ids, found

    proposal = FrontierProposal(recent, depth, history, refine)
    tree = OptTree(budget).select(proposal, Limits(nodes=budget, depth=depth))
    tree.validate()
    spelled = zip(tree.paths(), tree.log_weights[0, 1:].tolist(), strict=True)
    for path, weight in spelled:
        text = [3, 4, *path]
        expected = sum(
            float(log_probs[text[at - 2] if history == 2 else 0, text[at - 1], text[at]])
            for at in range(2, len(text))
        )
        assert weight == pytest.approx(expected, abs=1e-5)


@given(table=tables(max_depth=4, max_contexts=3, max_children=4), budget=st.integers(1, 20))
def test_beam_from_the_budget_up_is_exact(table, budget):
    assert select(table, budget).paths() == select(table, budget, beam=budget + 3).paths()


@given(table=tables(max_depth=4, max_contexts=3, max_children=4), beam=st.integers(1, 3))
def test_narrow_beam_looks_below_few_nodes(table, beam):
    tree = select(table, 20, beam=beam)
    parents = tree.parents[0, 1 : int(tree.num_nodes[0])].tolist()
    depths = tree.depths[0].tolist()
    for depth in range(1, tree.max_depth):
        assert len({parent for parent in parents if depths[parent] == depth}) <= beam


@given(table=tables(max_depth=4, max_contexts=3, max_children=4), length=st.integers(1, 5))
def test_chain_follows_the_best_child_of_the_token_drafted(table, length):
    proposal = TableProposal(torch.tensor([99]), table)
    limits = Chain(length).plan((), Limits(nodes=50, depth=table.token_ids.shape[1]))
    tree = Chain(length).select(proposal, limits)
    tree.validate()
    path, context = [], 0
    for depth in range(min(length, table.token_ids.shape[1])):
        if context < 0:
            break
        log_probs = table.log_probs[0, depth, context].clamp(max=0)
        child = int(log_probs.argmax())
        if log_probs[child] == -math.inf:
            break
        path.append(child)
        context = int(table.next_context[0, depth, context, child])
    assert tree.token_ids[0, 1 : int(tree.num_nodes[0])].tolist() == path


def test_limits_bind():
    table = Transitions(
        torch.arange(3).expand(1, 4, 1, 3),
        torch.zeros(1, 4, 1, 3),
        torch.zeros(1, 4, 1, 3, dtype=torch.int64),
    )
    proposal = TableProposal(torch.tensor([7]), table)
    tree = OptTree(63).select(proposal, Limits(nodes=5, depth=2))
    assert int(tree.num_nodes[0]) == 6
    assert int(tree.depths.max()) <= 2
    assert OptTree(0).plan((), Limits(nodes=9, depth=9)).allow_drafting is False
    assert Chain(0).plan((), Limits(nodes=9, depth=9)).allow_drafting is False
    assert Chain().plan((), Limits(nodes=9, depth=4)) == Limits(nodes=4, depth=4)


def test_several_rows_are_selected_at_once(device):
    """The batch axis is there: rows do not mix, shorter ones are padded with slots that are no nodes."""
    log_probs = torch.tensor([[[[-0.1, -3.0]]], [[[-1.0, -math.inf]]]], device=device)
    token_ids = torch.tensor([[[[1, 2]]], [[[3, 4]]]], device=device)
    table = Transitions(token_ids, log_probs, torch.full_like(token_ids, -1))
    tree = OptTree(2).select(TableProposal(torch.tensor([5, 6], device=device), table), Limits(2, 1))
    tree.validate()
    assert tree.num_nodes.tolist() == [3, 2]
    assert tree.paths(0) == [(1,), (2,)]
    assert tree.paths(1) == [(3,)]
