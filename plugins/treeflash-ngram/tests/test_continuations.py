"""Probabilities, against the definition applied to the token list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeflash_ngram.continuations import Continuations
from treeflash_ngram.trie import ROOT, SuffixTrie

tokens = st.integers(0, 3)
texts = st.lists(tokens, max_size=40)


def trie_of(text: list[int], longest: int) -> SuffixTrie:
    trie = SuffixTrie(longest)
    for token in text:
        trie.push(token)
    return trie


def reached(trie: SuffixTrie, path: list[int]) -> int:
    node = trie.context
    for token in path:
        node = trie.follow(node, token)
    return node


@given(longest=st.integers(1, 4), text=texts, path=st.lists(tokens, max_size=5))
def test_probabilities_are_those_of_the_definition(slow, longest, text, path):
    trie = trie_of(text, longest)
    found = Continuations(trie, limit=10).of(reached(trie, path))
    expected = slow(text, [*text, *path], longest)
    assert {one.token for one in found} == set(expected)
    for one in found:
        assert one.probability == pytest.approx(expected[one.token], rel=1e-12)
        # The context behind it is the longest one that ends in it.
        assert one.node == reached(trie, [*path, one.token])
    falling = [one.probability for one in found]
    assert falling == sorted(falling, reverse=True)
    assert sum(falling) < 1


@given(longest=st.integers(1, 4), text=texts, path=st.lists(tokens, max_size=3), limit=st.integers(1, 3))
def test_the_likeliest_are_kept(slow, longest, text, path, limit):
    trie = trie_of(text, longest)
    node = reached(trie, path)
    expected = sorted(slow(text, [*text, *path], longest).values(), reverse=True)[:limit]
    found = [one.probability for one in Continuations(trie, limit).of(node)]
    assert found == pytest.approx(expected, rel=1e-12)


@given(text=texts, first=st.lists(tokens, max_size=3), second=st.lists(tokens, max_size=3))
def test_what_was_asked_before_changes_nothing(text, first, second):
    trie = trie_of(text, 3)
    together = Continuations(trie, 10)
    for path in (first, second, first):
        node = reached(trie, path)
        assert together.of(node) == Continuations(trie, 10).of(node)


def test_behind_no_known_token_there_is_nothing():
    trie = trie_of([1, 2, 3], 2)
    assert Continuations(trie, 4).of(ROOT) == []
    assert Continuations(trie, 4).of(trie.follow(trie.context, 9)) == []
    assert Continuations(SuffixTrie(2), 4).of(ROOT) == []


def test_a_longer_match_weighs_more():
    # 5 was followed by 6 three times; behind 1 it was followed by 7, once.
    trie = trie_of([5, 6, 5, 6, 5, 6, 1, 5, 7, 2, 1], 2)
    first, second = Continuations(trie, 2).of(trie.follow(trie.context, 5))
    assert (first.token, second.token) == (7, 6)
    # By "1 5": one of one, doubt 2. By "5": three of four for 6, one for 7, doubt 4.
    assert first.probability == pytest.approx(1 / 3 + 2 / 3 * 1 / 8)
    assert second.probability == pytest.approx(2 / 3 * 3 / 8)


def test_what_is_seen_oftener_is_believed_more():
    once, thrice = trie_of([1, 2], 1), trie_of([1, 2, 1, 2, 1, 2], 1)
    weights = [Continuations(trie, 1).of(trie.follow(ROOT, 1))[0].probability for trie in (once, thrice)]
    assert weights == pytest.approx([1 / 3, 3 / 5])
