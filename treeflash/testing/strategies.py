"""Hypothesis strategies for what flows through a step."""

from hypothesis import strategies as st

from treeflash.tree import TokenTree


@st.composite
def token_trees(draw: st.DrawFn, max_nodes: int = 12, vocab_size: int = 30) -> TokenTree:
    """Valid trees of one row, their nodes by falling weight.

    Args:
        draw: Given by hypothesis.
        max_nodes: Nodes at most, the root included.
        vocab_size: Token ids are below it; at least `max_nodes`.

    Returns:
        A strategy of trees.
    """
    count = draw(st.integers(1, max_nodes))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, count))]
    token_ids = draw(st.lists(st.integers(0, vocab_size - 1), min_size=count, max_size=count, unique=True))
    falls = draw(st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0]), min_size=count, max_size=count))
    weights = [0.0]
    for fall in falls[1:]:
        weights.append(weights[-1] - fall)
    return TokenTree.from_lists(token_ids, parents, weights)
