"""The heap gives the tree that the levels give, bit by bit; and is used where it can be."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeflash.components.selectors.opt_tree import OptTree
from treeflash.proposal import TableProposal, usable
from treeflash.types import Limits, Transitions

# Sums of the former are often equal and never rounded, those of the latter nearly always. Above 0 a
# probability was rounded.
TIES = [0.0, 1e-7, -0.25, -0.5, -0.5, -1.0, -math.inf]
ROUNDED = st.floats(-3, 0, width=32) | st.sampled_from([0.0, 1e-7, -0.1, -0.3, -3e38, -math.inf])


class ByLevels(TableProposal):
    """Does not tell that it knows everything."""

    table = None


class Known(TableProposal):
    """Is not to be asked."""

    def children(self, depth, handles):
        raise AssertionError("asked for a level")


@st.composite
def tables(draw, falling=True):
    """Transitions of a few rows, each node's token its own."""
    shape = (draw(st.integers(1, 2)), *(draw(st.integers(1, most)) for most in (5, 3, 4)))
    count = math.prod(shape)
    values = draw(st.sampled_from([st.sampled_from(TIES), ROUNDED]))
    log_probs = torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), dtype=torch.float32)
    log_probs = log_probs.view(shape)
    if falling:
        log_probs = log_probs.sort(dim=-1, descending=True).values
    # One that leads nowhere stands at the last level too, where none is followed.
    following = draw(st.lists(st.integers(-1, shape[2] - 1), min_size=count, max_size=count))
    return Transitions(torch.arange(count).view(shape), log_probs, torch.tensor(following).view(shape))


def anchors(table):
    return 1000 + torch.arange(len(table.token_ids))


def assert_equal(found, expected):
    found.validate()
    assert found.max_depth == expected.max_depth
    assert torch.equal(found.num_nodes, expected.num_nodes)
    # To the last bit; and behind the nodes of a shorter row nothing has any weight.
    assert found.log_weights.dtype == torch.float32
    assert torch.equal(found.log_weights.view(torch.int32), expected.log_weights.view(torch.int32))
    there = found.is_node
    for part in ("token_ids", "parents", "depths"):
        assert torch.equal(getattr(found, part)[there], getattr(expected, part)[there]), part


def assert_same_trees(table, nodes, depth):
    limits = Limits(nodes, depth)
    found = OptTree(nodes).select(Known(anchors(table), table), limits)
    assert_equal(found, OptTree(nodes).select(ByLevels(anchors(table), table), limits))


@given(table=tables(), nodes=st.integers(0, 70), depth=st.integers(0, 6))
def test_the_same_tree(table, nodes, depth):
    """Few nodes and more than there are, shallow and deeper than the table."""
    assert_same_trees(table, nodes, depth)


@pytest.mark.parametrize("nodes", [15, 63, 255, 1023])
@pytest.mark.parametrize("ties", [False, True])
def test_the_same_large_tree(nodes, ties):
    random = torch.Generator().manual_seed(nodes)
    shape = (1, 7, 16, 16)
    log_probs = (2 * torch.randn(*shape[:3], 100, generator=random)).log_softmax(dim=-1)
    log_probs = log_probs.sort(descending=True).values[..., :16]
    if ties:
        log_probs = (2 * log_probs).round() / 2
    following = torch.randint(-1, 16, shape, generator=random)
    table = Transitions(torch.arange(log_probs.numel()).view(shape), log_probs, following)
    assert_same_trees(table, nodes, 7)


def test_a_weight_beyond_single_precision_is_none():
    """Each is finite, their sum is not."""
    log_probs = torch.tensor([-1.0, -3e38]).expand(1, 2, 1, 2)
    following = torch.zeros(1, 2, 1, 2, dtype=torch.int64)
    table = Transitions(torch.arange(4).view(1, 2, 1, 2), log_probs, following)
    assert_same_trees(table, 9, 2)
    tree = OptTree(9).select(Known(anchors(table), table), Limits(9, 2))
    assert tree.paths() == [(0,), (0, 2), (1,), (0, 3), (1, 2)]


def assert_same_answers(table, nodes, **options):
    selector, limits = OptTree(20, **options), Limits(nodes, 5)
    found = selector.select(TableProposal(anchors(table), table), limits)
    assert_equal(found, selector.select(ByLevels(anchors(table), table), limits))


@given(table=tables(falling=False), nodes=st.integers(0, 20))
def test_children_may_stand_in_any_order(table, nodes):
    assert_same_answers(table, nodes)


@given(table=tables(), nodes=st.integers(0, 20), beam=st.integers(1, 4))
def test_a_beam_is_heeded(table, nodes, beam):
    assert_same_answers(table, nodes, beam=beam)


@pytest.mark.parametrize("none", [math.nan, math.inf])
def test_children_behind_one_that_is_none_are_found(none):
    """Sorting puts what is no number first."""
    log_probs = torch.tensor([none, -1.0, -2.0]).expand(1, 2, 1, 3)
    assert usable(log_probs)[0, 0, 0].tolist() == [-math.inf, -1.0, -2.0]
    following = torch.zeros(1, 2, 1, 3, dtype=torch.int64)
    table = Transitions(torch.arange(6).view(1, 2, 1, 3), log_probs, following)
    tree = OptTree(9).select(TableProposal(anchors(table), table), Limits(9, 2))
    assert tree.paths() == [(1,), (2,), (1, 4), (1, 5), (2, 4), (2, 5)]


@pytest.mark.parametrize("shape", [(2, 0, 1, 1), (1, 2, 3, 0)])
def test_a_table_that_holds_nothing(shape):
    ids = torch.zeros(shape, dtype=torch.int64)
    assert_same_trees(Transitions(ids, ids.float(), ids), 9, 3)


def test_a_table_that_learns_can_be_read():
    log_probs = torch.full((1, 1, 1, 2), -1.0, requires_grad=True)
    following = torch.full((1, 1, 1, 2), -1)
    assert_same_trees(Transitions(torch.arange(2).view(1, 1, 1, 2), log_probs, following), 9, 1)


def test_a_table_elsewhere_is_explored_where_it_lies(device):
    shape = (1, 2, 1, 2)
    ids = torch.arange(4, device=device).view(shape)
    table = Transitions(ids, torch.full(shape, -1.0, device=device), torch.zeros_like(ids))
    tree = OptTree(9).select(TableProposal(torch.tensor([7], device=device), table), Limits(9, 2))
    assert tree.log_weights.device.type == device
    assert tree.paths() == [(0,), (1,), (0, 2), (0, 3), (1, 2), (1, 3)]
