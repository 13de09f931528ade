"""A verifier with a fault, to see that whatever looks for faults finds it."""

import itertools
from collections.abc import Iterator

import attrs

from treeflash.components.verifiers.sdpa_tree import SdpaTree
from treeflash.sampling import Draws
from treeflash.target_interface import Target
from treeflash.tree import TokenTree
from treeflash.types import Acceptance, DecodeState


@attrs.frozen
class Careless(SdpaTree):
    """Takes one token in a hundred for the one with the next id."""

    _numbers: Iterator[int] = attrs.field(factory=lambda: itertools.count(1), init=False)

    def verify(self, target: Target, state: DecodeState, tree: TokenTree, draws: Draws) -> Acceptance:
        """Verifies, and every hundredth time goes wrong."""
        acceptance = super().verify(target, state, tree, draws)
        tokens = [list(row) for row in acceptance.tokens]
        for index in range(len(tokens[0])):
            if next(self._numbers) % 100 == 0:
                tokens[0][index] = (tokens[0][index] + 1) % target.vocab_size
        return attrs.evolve(acceptance, tokens=tokens)
