import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeflash.testing.strategies import token_trees
from treeflash.tree import TokenTree

TREE = TokenTree.from_lists([9, 1, 2, 3, 4], [-1, 0, 0, 1, 3], [0.0, -0.1, -0.2, -0.3, -0.4])


@given(tree=token_trees())
def test_ancestor_mask_is_the_path_to_each_node(tree):
    mask = tree.ancestor_mask()[0]
    for node in range(int(tree.num_nodes[0])):
        assert mask[node].nonzero()[:, 0].tolist() == sorted(tree.path_to(node))


@given(tree=token_trees(), padding=st.integers(1, 4))
def test_empty_slots_see_themselves_and_are_seen_by_nobody(tree, padding):
    padded = pad(tree, padding)
    size, mask = tree.size, padded.ancestor_mask()[0]
    assert torch.equal(mask[:size, :size], tree.ancestor_mask()[0])
    assert not mask[:size, size:].any()
    assert torch.equal(mask[size:], torch.eye(padded.size, dtype=torch.bool)[size:])
    assert padded.is_node.sum() == size


def pad(tree, padding):
    """Slots behind the nodes that look like children of the root with token 0."""

    def longer(part):
        return torch.cat([part, part.new_zeros(1, padding)], dim=1)

    parts = (tree.token_ids, tree.parents, tree.depths, tree.log_weights)
    return TokenTree(*map(longer, parts), tree.num_nodes, tree.max_depth)


@given(tree=token_trees(), data=st.data())
def test_first_nodes_are_a_tree(tree, data):
    count = data.draw(st.integers(1, tree.size + 2))
    pruned = tree.first(count)
    pruned.validate()
    assert pruned.paths() == tree.paths()[: count - 1]
    assert int(pruned.num_nodes[0]) == min(count, tree.size)


def test_root_only():
    tree = TokenTree.root_only(torch.tensor([3, 4]))
    tree.validate()
    assert tree.paths(1) == []
    assert tree.token_ids.tolist() == [[3], [4]]


def test_paths_spell_tokens():
    assert TREE.paths() == [(1,), (2,), (1, 3), (1, 3, 4)]
    assert TREE.path_to(4) == [0, 1, 3, 4]


def test_picture():
    assert TREE.picture(accepted=[0, 1]).splitlines() == [
        "* 9  1.000",
        "* ├─ 1  0.905",
        "  │  └─ 3  0.741",
        "  │     └─ 4  0.670",
        "  └─ 2  0.819",
    ]


@pytest.mark.parametrize(
    ("tokens", "parents", "weights", "message"),
    [
        ([1, 2], [-1, 1], None, "node 1 names parent 1"),
        ([1, 2, 2], [-1, 0, 0], None, "token 2 stands twice under node 0"),
        ([1, 2], [-1, -1], None, "parent must be in 0..0, found -1"),
        ([1, 2, 3], [-1, 0, 0], [0.0, -1.0, -0.5], "weight above"),
    ],
)
def test_what_is_no_tree_is_refused(tokens, parents, weights, message):
    with pytest.raises(ValueError, match=message):
        TokenTree.from_lists(tokens, parents, weights)


def test_wrong_dtype_names_the_field():
    with pytest.raises(ValueError, match=r"TokenTree.parents must be int64 \[B, N\], found torch.float32"):
        TokenTree(TREE.token_ids, TREE.parents.float(), TREE.depths, TREE.log_weights, TREE.num_nodes, 3)


def test_count_below_one_is_refused():
    with pytest.raises(ValueError, match="count must be >= 1, found 0"):
        TREE.first(0)
