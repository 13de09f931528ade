"""The counts of all pieces, against a recount of the whole text after every change."""

from collections import Counter

import attrs
from hypothesis import given
from hypothesis import strategies as st
from treeflash_ngram.trie import ROOT, SuffixTrie

tokens = st.integers(0, 3)
# What happens to a text: tokens that are added, or how many are taken back.
histories = st.lists(st.lists(tokens, min_size=1, max_size=9) | st.integers(1, 12), max_size=8)


def recount(text: list[int], longest: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[start : start + size])
        for size in range(1, longest + 2)
        for start in range(len(text) - size + 1)
    )


def pieces(trie: SuffixTrie) -> dict[tuple[int, ...], int]:
    """Each node by its piece."""
    found, waiting = {(): ROOT}, [()]
    while waiting:
        piece = waiting.pop()
        for child in trie.children(found[piece]):
            longer = (*piece, trie.token[child])
            assert longer not in found
            found[longer] = child
            waiting.append(longer)
    return found


def replayed(text: list[int], longest: int) -> SuffixTrie:
    trie = SuffixTrie(longest)
    for token in text:
        trie.push(token)
    return trie


def check(trie: SuffixTrie, text: list[int]) -> None:
    assert trie.tokens == text
    assert len(trie) == len(text)
    found = pieces(trie)
    counts = {piece: trie.count[node] for piece, node in found.items() if piece}
    assert counts == recount(text, trie.longest)
    assert trie.num_nodes == len(found)
    assert all(trie.link[node] == found[piece[1:]] for piece, node in found.items())
    assert trie.context == found[tuple(text[-trie.longest :])]


@given(longest=st.integers(1, 4), history=histories)
def test_counts_are_those_of_the_text(longest, history):
    trie, text = SuffixTrie(longest), []
    for change in history:
        if isinstance(change, int):
            for _ in range(min(change, len(text))):
                trie.pop()
                text.pop()
        else:
            for token in change:
                trie.push(token)
                text.append(token)
        check(trie, text)


@given(longest=st.integers(1, 4), text=st.lists(tokens, max_size=20), more=st.lists(tokens, max_size=20))
def test_what_is_taken_back_leaves_no_trace(longest, text, more):
    trie = replayed(text + more, longest)
    for _ in more:
        trie.pop()
    assert attrs.asdict(trie) == attrs.asdict(replayed(text, longest))


@given(longest=st.integers(1, 4), text=st.lists(tokens, max_size=30), ahead=st.lists(tokens, max_size=6))
def test_following_finds_the_longest_known_context(longest, text, ahead):
    trie = replayed(text, longest)
    found, before = pieces(trie), attrs.asdict(trie)
    node, path = trie.context, text[-longest:]
    for token in ahead:
        node = trie.follow(node, token)
        path = [*path, token]
        # The longest tail of the path that the text has, up to the longest piece kept.
        tails = (tuple(path[-size:]) for size in range(min(longest + 1, len(path)), 0, -1))
        assert node == next((found[tail] for tail in tails if tail in found), ROOT)
    assert attrs.asdict(trie) == before


def test_the_continuation_that_first_came_last_is_first():
    trie = replayed([1, 2, 1, 3, 1, 2, 1, 4], 2)
    node = trie.follow(ROOT, 1)
    assert [trie.token[child] for child in trie.children(node)] == [4, 3, 2]


def test_a_token_takes_no_longer_in_a_long_text():
    # Counted, not timed: what is touched is a node for each length of context.
    touched = []

    class Counting(list):
        def __setitem__(self, index, value):
            touched.append(index)
            super().__setitem__(index, value)

    trie = replayed([token % 7 for token in range(3000)], 3)
    trie.count = Counting(trie.count)
    trie.push(3000 % 7)
    assert len(touched) == 4
