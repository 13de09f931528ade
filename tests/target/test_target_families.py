"""A tree read in one pass gives, at each node, what the model alone gives on that node's path."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from treeflash.target import wrap_model
from treeflash.testing.families import FAMILIES, tiny_model
from treeflash.tree import TokenTree

from .target_helpers import (
    BROAD,
    BROAD_PROMPT,
    DEEP,
    NO_SDPA,
    READINGS,
    VOCAB,
    assert_close,
    at_nodes,
    padded,
    plain,
    prompts,
    row,
    shared_target,
    token_ids,
    trees,
)

families = pytest.mark.parametrize("family", READINGS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
# The device does not change between examples. Derandomised: in float32 an expert's router may stand
# on a knife's edge for one draw in many thousands.
few = settings(max_examples=5, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])

# A tree, which of its nodes is accepted (counted from the last), how many positions are then
# forgotten, and what is read in their place.
rounds = st.tuples(trees(7), st.integers(0, 6), st.integers(0, 9), st.lists(token_ids, max_size=3))


def verify(target, state, tree):
    with torch.no_grad():
        return target.verify(state, tree)


def prefill(target, state, ids):
    with torch.no_grad():
        return target.prefill(state, row(ids, target.device))


@families
@dtypes
@few
@given(prompt=prompts, shape=trees())
@example(prompt=BROAD_PROMPT, shape=BROAD)
@example(prompt=BROAD_PROMPT[:3], shape=BROAD)
@example(prompt=BROAD_PROMPT, shape=DEEP)
@example(prompt=BROAD_PROMPT[:3], shape=DEEP)
def test_a_node_has_the_logits_of_its_path(family, dtype, device, prompt, shape):
    target = shared_target(family, dtype, device)
    state = target.start(1, 64, ())
    tree = TokenTree.from_lists(*shape, device=device)
    last = prefill(target, state, prompt).logits
    nodes = verify(target, state, tree).logits
    assert last.shape == (1, 1, VOCAB)
    assert nodes.dtype == dtype
    assert_close(last[0, 0], plain(target.model, prompt)[-1], family)
    assert_close(nodes[0], at_nodes(tree, prompt, lambda ids: plain(target.model, ids)), family)


@families
@dtypes
@few
@given(prompt=prompts, steps=st.lists(rounds, min_size=2, max_size=3))
@example(prompt=BROAD_PROMPT, steps=[(BROAD, 3, 0, []), (DEEP, 1, 6, [1]), (BROAD, 0, 0, [])])
def test_trees_go_on_from_what_was_kept(family, dtype, device, prompt, steps):
    target = shared_target(family, dtype, device)
    state = target.start(1, 128, ())
    prefill(target, state, prompt)
    committed = list(prompt)
    for shape, back, forgotten, instead in steps:
        tree = TokenTree.from_lists(*shape, device=device)
        nodes = verify(target, state, tree).logits
        assert_close(nodes[0], at_nodes(tree, committed, lambda ids: plain(target.model, ids)), family)
        path = tree.path_to(tree.size - 1 - back % tree.size)
        target.commit(state, [path])
        committed += [shape[0][node] for node in path]
        if forgotten:
            committed = committed[: max(1, len(committed) - forgotten)]
            target.rewind(state, torch.tensor([len(committed)]))
        if instead:
            last = prefill(target, state, instead).logits
            committed += instead
            assert_close(last[0, 0], plain(target.model, committed)[-1], family)
        assert state.cache.length == len(committed)


@families
@pytest.mark.parametrize(
    "held",
    [{}, {"token_ids": 5, "parents": 3, "depths": 1, "log_weights": -1}],
    ids=["zeros", "leftovers"],
)
def test_empty_slots_change_nothing(family, held, device):
    target = shared_target(family, torch.float64, device)
    tree = TokenTree.from_lists(*BROAD, device=device)
    state = target.start(1, 64, ())
    prefill(target, state, BROAD_PROMPT)
    nodes = verify(target, state, padded(tree, 4, **held)).logits[0]
    assert bool(nodes.isfinite().all())  # nobody reads the slots' logits, but NaN would spread
    assert_close(
        nodes[: tree.size], at_nodes(tree, BROAD_PROMPT, lambda ids: plain(target.model, ids)), family
    )
    # The slots' rows are dropped with the rejected ones.
    path = tree.path_to(5)
    target.commit(state, [path])
    committed = BROAD_PROMPT + [BROAD[0][node] for node in path]
    following = verify(target, state, padded(tree, 2, **held)).logits[0, : tree.size]
    assert_close(following, at_nodes(tree, committed, lambda ids: plain(target.model, ids)), family)


@pytest.mark.parametrize("family", FAMILIES)
@dtypes
def test_the_probe_lets_it_pass(family, dtype, device):
    target = wrap_model(tiny_model(family, dtype=dtype, device=device))
    assert target.attention == ("eager" if family in NO_SDPA else "sdpa")


@families
def test_a_root_alone_is_one_step_of_plain_decoding(family, device):
    target = shared_target(family, torch.float64, device)
    state = target.start(1, 16, ())
    prefill(target, state, BROAD_PROMPT)
    root = TokenTree.root_only(torch.tensor([7], device=device))
    nodes = verify(target, state, root).logits
    assert_close(nodes[0], plain(target.model, [*BROAD_PROMPT, 7])[-1:], family)
