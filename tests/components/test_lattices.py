"""Contexts and transitions against loops written out."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from treeflash import interfaces
from treeflash.components.builders.frontier import Frontier
from treeflash.components.builders.top_m import TopM
from treeflash.interfaces import Refiner
from treeflash.types import BlockDraft, DraftHead, Lattice, Limits

VOCABULARY = 6
LIMITS = Limits(nodes=20, depth=5)


def random_draft(seed, depth, vocabulary=VOCABULARY):
    """Hidden states that are their own logits."""
    logits = torch.randn(1, depth, vocabulary, generator=torch.Generator().manual_seed(seed))
    head = DraftHead(
        embed=lambda ids: torch.nn.functional.one_hot(ids, vocabulary).float(),
        norm=lambda hidden: hidden,
        project=lambda normed: normed,
        vocab_size=vocabulary,
    )
    return BlockDraft(torch.tensor([[4, 5]]), logits, logits, head)


class Scores(Refiner):
    """Any distribution that is a function of the position and the tokens before it."""

    def __init__(self, history, seed=0):
        self.history = history
        shape = (8, *[VOCABULARY] * history, VOCABULARY)
        self.table = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)

    def children(self, draft, slots, previous, k):
        at = (slots.expand(previous.shape[:2]), *previous.unbind(-1))
        log_probs, ids = self.table[at].sort(dim=-1, descending=True)
        return ids[..., :k], log_probs[..., :k]


@given(seed=st.integers(0, 500), depth=st.integers(1, 5), branching=st.integers(1, VOCABULARY))
def test_contexts_of_one_token(seed, depth, branching):
    draft = random_draft(seed, depth)
    lattice = TopM(branching, 4).build(draft, 1, LIMITS)
    assert lattice.contexts[0, 0, :, 0].tolist() == [5] * branching
    assert lattice.is_context[0, 0].tolist() == [True] + [False] * (branching - 1)
    for level in range(1, depth):
        expected = draft.normed[0, level - 1].topk(branching).indices.tolist()
        assert lattice.contexts[0, level, :, 0].tolist() == expected
        assert lattice.is_context[0, level].all()


@given(seed=st.integers(0, 500), depth=st.integers(1, 5), branching=st.integers(1, VOCABULARY))
def test_contexts_of_two_tokens(seed, depth, branching):
    """The tokens before and at the anchor; the anchor with each token; then the best pairs."""
    draft = random_draft(seed, depth)
    lattice = TopM(branching, 4).build(draft, 2, LIMITS)
    log_probs = draft.normed[0].log_softmax(-1)
    best = log_probs.topk(branching, dim=-1).indices.tolist()
    found = [[tuple(pair) for pair in level] for level in lattice.contexts[0].tolist()]
    assert found[0] == [(4, 5)] * branching
    if depth > 1:
        assert found[1] == [(5, token) for token in best[0]]
    for level in range(2, depth):
        pairs = itertools.product(best[level - 2], best[level - 1])
        joint = {pair: float(log_probs[level - 2, pair[0]] + log_probs[level - 1, pair[1]]) for pair in pairs}
        weights = sorted(joint.values(), reverse=True)[:branching]
        assert [joint[pair] for pair in found[level]] == pytest.approx(weights, abs=1e-5)
        assert len(set(found[level])) == branching


@pytest.mark.parametrize("history", [1, 2])
@given(
    seed=st.integers(0, 500),
    depth=st.integers(1, 5),
    branching=st.integers(1, VOCABULARY),
    children=st.integers(1, VOCABULARY),
    trimmed=st.booleans(),
)
def test_transitions(history, seed, depth, branching, children, trimmed):
    draft, refiner = random_draft(seed, depth), Scores(history, seed)
    lattice = TopM(branching, children).build(draft, history, LIMITS)
    with pytest.MonkeyPatch.context() as patch:  # as on a CPU, and as on a GPU
        patch.setattr(interfaces, "trims", lambda device: trimmed)
        table = refiner.transitions(draft, lattice)
    contexts = [[tuple(context) for context in level] for level in lattice.contexts[0].tolist()]
    for level, context in itertools.product(range(depth), range(branching)):
        before = contexts[level][context]
        expected = refiner.table[(level, *before)].sort(descending=True)
        assert table.token_ids[0, level, context].tolist() == expected.indices[:children].tolist()
        assert torch.equal(table.log_probs[0, level, context], expected.values[:children])
        for child, token in enumerate(table.token_ids[0, level, context].tolist()):
            after = (*before[1:], token)
            wanted = (
                contexts[level + 1].index(after) if level + 1 < depth and after in contexts[level + 1] else -1
            )
            assert int(table.next_context[0, level, context, child]) == wanted


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("history", [0, 1, 2])
@given(data=st.data(), depth=st.integers(1, 3), width=st.integers(1, 5))
def test_next_contexts_of_several_rows(history, data, depth, width):
    """No table of all children by all contexts, and each child finds the first context that it leads to."""
    seed = data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randint(0, 3, (2, depth, width, history), generator=generator)
    is_context = torch.rand(2, depth, width, generator=generator) < 0.7
    token_ids = torch.randint(0, 3, (2, depth, width, 4), generator=generator)
    with Largest() as largest:
        found = interfaces._next_contexts(Lattice(contexts, is_context, 4), token_ids)
    assert largest.numel <= token_ids.numel() * max(1, history)
    for row, level, context, child in itertools.product(range(2), range(depth), range(width), range(4)):
        reached = [*contexts[row, level, context].tolist(), int(token_ids[row, level, context, child])]
        below = contexts[row, level + 1].tolist() if level + 1 < depth else []
        matching = [
            place
            for place, tokens in enumerate(below)
            if is_context[row, level + 1, place] and tokens == reached[1:][:history]
        ]
        assert int(found[row, level, context, child]) == (matching[0] if matching else -1)


@pytest.mark.parametrize("history", [1, 2])
def test_contexts_take_no_table_of_all_pairs(history):
    draft = random_draft(0, 4, vocabulary=600)
    with Largest() as largest:
        lattice = TopM(500, 500).build(draft, history, LIMITS)
    assert lattice.contexts.shape == (1, 4, 500, history)
    assert largest.numel < 500 * 50


@pytest.mark.parametrize("builder", [TopM(6, 6), Frontier(6)])
def test_no_more_children_than_a_tree_has_nodes(builder):
    draft = random_draft(0, 3)
    assert builder.build(draft, 1, Limits(4, 3)).children == 4
    assert builder.build(draft, 1, Limits(9, 3)).children == 6


def test_what_is_no_context_is_not_gone_on_from():
    contexts = torch.tensor([[[[5], [5]], [[1], [2]]]])
    is_context = torch.tensor([[[True, False], [True, False]]])
    table = Scores(1).transitions(random_draft(0, 2), Lattice(contexts, is_context, VOCABULARY))
    following = dict(
        zip(table.token_ids[0, 0, 0].tolist(), table.next_context[0, 0, 0].tolist(), strict=True)
    )
    assert following[1] == 0
    assert set(following.values()) == {0, -1}


@pytest.mark.parametrize("history", [1, 2])
@given(seed=st.integers(0, 500), depth=st.integers(1, 5), least=st.sampled_from([0.05, 0.2, 0.5, 0.99]))
def test_contexts_behind_unlikely_tokens_are_left_out(history, seed, depth, least):
    draft, refiner = random_draft(seed, depth), Scores(history, seed)
    whole, lattice = (TopM(VOCABULARY, 3, some).build(draft, history, LIMITS) for some in (0.0, least))
    assert torch.equal(lattice.contexts, whole.contexts)
    probabilities = draft.normed[0].softmax(-1)
    for level in range(1, depth):
        for place, context in enumerate(lattice.contexts[0, level].tolist()):
            likely = float(probabilities[level - 1, context[-1]]) >= least
            assert bool(lattice.is_context[0, level, place]) == (likely or place == 0)
    asked = []
    children = refiner.children

    def spy(draft, slots, previous, k):
        asked.append((slots.tolist(), previous[0].tolist()))
        return children(draft, slots, previous, k)

    refiner.children = spy
    found, expected = refiner.transitions(draft, lattice), refiner.transitions(draft, whole)
    # What is left out is not computed, and what is not is as it was.
    kept = lattice.is_context[0].nonzero().tolist()
    assert asked[0][0] == [level for level, _ in kept]
    assert asked[0][1] == [lattice.contexts[0, level, place].tolist() for level, place in kept]
    for level, place in kept:
        assert found.token_ids[0, level, place].tolist() == expected.token_ids[0, level, place].tolist()
        torch.testing.assert_close(found.log_probs[0, level, place], expected.log_probs[0, level, place])
        # Below a child whose context was left out nothing can be asked for.
        for child, below in enumerate(found.next_context[0, level, place].tolist()):
            before = int(expected.next_context[0, level, place, child])
            reached = before >= 0 and bool(lattice.is_context[0, level + 1, before])
            assert below == (before if reached else -1)
