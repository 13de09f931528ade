"""A drafter without weights: what followed the last tokens when the text had them before."""

import heapq
from collections.abc import Sequence

import attrs
import numpy as np
import torch
from attrs.validators import and_, ge, le
from torch import Tensor

from treeflash.interfaces import Drafter
from treeflash.proposal import TableProposal
from treeflash.types import Limits, Transitions
from treeflash_ngram.continuations import Continuation, Continuations
from treeflash_ngram.trie import SuffixTrie

# For each depth its contexts, trie nodes, in the order in which they were reached.
Levels = list[dict[int, list[Continuation]]]


@attrs.define(eq=False)
class NgramState:
    """What the drafter remembers of its sequences.

    Attributes:
        tries: Of each row, the text so far.
    """

    tries: list[SuffixTrie]


@attrs.frozen
class Ngram(Drafter):
    """Drafts what followed the last tokens when prompt or answer had them before.

    It has nothing to load or to train, and fits any target. It pays wherever a text repeats itself or its
    prompt: names, numbers, code, quotations. A text that says nothing twice is drafted nothing for.

    All of it is on the host. A draft is explored best first, which finds the contexts that a tree of
    the `limits.nodes` heaviest nodes can hold; these go to the device as one table.

    Source: drafting by look-up in the prompt is Saxena's (2023, "Prompt lookup decoding"), there one
    continuation of one match.

    Attributes:
        longest: Tokens of the longest context that is looked up, up to 32. Each token of the text makes
            up to one entry more than that.
        depth: Levels drafted.
        children: Continuations of a context.
    """

    longest: int = attrs.field(default=5, validator=and_(ge(1), le(32)))
    depth: int = attrs.field(default=8, validator=ge(1))
    children: int = attrs.field(default=8, validator=ge(1))

    drafts_blocks = False

    @property
    def max_depth(self) -> int:  # type: ignore[override]  # an option says how many
        """Levels drafted."""
        return self.depth

    def start(self, batch_size: int, capacity: int) -> NgramState:
        """Makes empty texts."""
        return NgramState([SuffixTrie(self.longest) for _ in range(batch_size)])

    def extend(self, state: NgramState, token_ids: Tensor, taps: Tensor | None, counts: Tensor) -> None:
        """Adds the tokens, `longest + 1` entries each."""
        for trie, row, count in zip(state.tries, token_ids.tolist(), counts.tolist(), strict=True):
            for token in row[:count]:
                trie.push(token)

    def rewind(self, state: NgramState, lengths: Tensor) -> None:
        """Takes the last tokens back, counts included."""
        for trie, length in zip(state.tries, lengths.tolist(), strict=True):
            while len(trie) > length:
                trie.pop()

    def propose(self, state: NgramState, recent: Tensor, limits: Limits) -> TableProposal:
        """Looks up what followed; a table without a level when nothing did."""
        anchors = recent[:, 1]
        rows = [
            self._explore(trie, trie.follow(trie.context, anchor), limits)
            for trie, anchor in zip(state.tries, anchors.tolist(), strict=True)
        ]
        return TableProposal(anchors, _table(rows, recent.device))

    def _explore(self, trie: SuffixTrie, context: int, limits: Limits) -> Levels:
        """Expands the root and the heaviest nodes; the tree's last has no room for a child below it."""
        continuations = Continuations(trie, self.children)
        deepest = min(self.depth, limits.depth)
        levels: Levels = []
        # Nodes to expand by falling weight: its negative, their children's depth, their context.
        heap = [(-1.0, 1, context)]
        for _ in range(limits.nodes):
            if not heap:
                break
            weight, depth, context = heapq.heappop(heap)
            found = continuations.of(context) if depth <= deepest else []
            if found:
                if depth > len(levels):
                    levels.append({})
                levels[depth - 1][context] = found
                for child in found:
                    heapq.heappush(heap, (weight * child.probability, depth + 1, child.node))
        return levels


def _table(rows: Sequence[Levels], device: torch.device) -> Transitions:
    """Lays the contexts of all rows out, each with its children; paths that meet share a context."""
    depth = max(map(len, rows))
    contexts = [level for levels in rows for level in levels]
    width = max(map(len, contexts), default=1)
    children = max((len(found) for level in contexts for found in level.values()), default=1)
    shape = (len(rows), depth, width, children)
    token_ids = np.zeros(shape, dtype=np.int64)
    log_probs = np.full(shape, -np.inf, dtype=np.float32)
    following = np.full(shape, -1, dtype=np.int64)
    for row, levels in enumerate(rows):
        for level, here in enumerate(levels):
            below = levels[level + 1] if level + 1 < len(levels) else {}
            index = {context: number for number, context in enumerate(below)}
            for number, found in enumerate(here.values()):
                at = (row, level, number, slice(len(found)))
                token_ids[at] = [child.token for child in found]
                log_probs[at] = np.log([child.probability for child in found])
                following[at] = [index.get(child.node, -1) for child in found]
    table = (torch.from_numpy(part).to(device) for part in (token_ids, log_probs, following))
    return Transitions(*table)
