"""Comparing a text decoded through trees with the target's own, token by token.

In low precision a tree and a single row round differently, and where the two likeliest tokens nearly tie,
either may come out. An audit tells that from a fault: it looks at the scores that both runs chose by.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from treeflash.engine.decoder import Decoder
from treeflash.engine.generation import Generation
from treeflash.sampling import Draws
from treeflash.target_interface import Target
from treeflash.tree import TokenTree
from treeflash.types import TargetOutput

NEAR_TIE, MISMATCH = "near-tie", "mismatch"


@attrs.frozen
class Audit:
    """What a comparison came to.

    Attributes:
        identical: Whether both texts are the same.
        first_difference: Index of the first new token that is not; None when there is none.
        kind: "near-tie" when, in both runs, both tokens are no further below the best than twice the greatest
            difference between the runs' scores there; otherwise "mismatch"; None when identical.
    """

    identical: bool
    first_difference: int | None
    kind: str | None


def audited(decoder: Decoder, token_ids: Sequence[int] | Tensor, **settings: Any) -> tuple[Generation, Audit]:
    """Decodes a text, and plainly once more.

    Args:
        decoder: The decoder.
        token_ids: The prompt, as in `Decoder.generate`.
        **settings: As in `Decoder.generate`.

    Returns:
        The text, and how it compares with the plain one.
    """
    through_trees, plainly = _Recorder(decoder.target), _Recorder(decoder.target)
    try:
        generation = through_trees.run(attrs.evolve(decoder, target=through_trees), token_ids, settings)
        plain = plainly.run(Decoder(plainly), token_ids, {**settings, "on_emission": None})
    finally:
        # Parts are bound to one target at a time: back to their own.
        attrs.evolve(decoder)
    draws = Draws(settings.get("temperature", 0.0), settings.get("seed", 0), (settings.get("sequence", 0),))
    prompt_length = generation.prompt_tokens
    return generation, compare(
        (generation.token_ids, through_trees.logits), (plain.token_ids, plainly.logits), draws, prompt_length
    )


def compare(
    one: tuple[Sequence[int], Sequence[Tensor]],
    other: tuple[Sequence[int], Sequence[Tensor]],
    draws: Draws,
    prompt_length: int,
) -> Audit:
    """Compares two runs over one prompt.

    Args:
        one: New tokens of a run, and for each the logits `[V]` it was chosen by.
        other: The same of the other.
        draws: How both chose.
        prompt_length: Tokens of the prompt.

    Returns:
        The result.
    """
    (mine, my_logits), (theirs, their_logits) = one, other
    place = next(
        (index for index, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None
    )
    if place is None:
        if len(mine) == len(theirs):
            return Audit(True, None, None)
        return Audit(False, min(len(mine), len(theirs)), MISMATCH)
    position = torch.tensor([prompt_length + place - 1])
    pair = [mine[place], theirs[place]]
    scores = [draws.scores(logits[place], position) for logits in (my_logits, their_logits)]
    apart = float((scores[0] - scores[1]).abs().max())
    for run in scores:
        # Three and more may tie: in bfloat16 many scores are equal.
        if float((run.max() - run[pair]).max()) > 2 * apart:
            return Audit(False, place, MISMATCH)
    return Audit(False, place, NEAR_TIE)


class _Recorder:
    """A target that keeps the logits each new token was chosen by.

    Args:
        target: What it stands for.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.logits: list[Tensor] = []
        self._last: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def run(
        self, decoder: Decoder, token_ids: Sequence[int] | Tensor, settings: dict[str, Any]
    ) -> Generation:
        """Decodes, following which nodes were accepted."""
        outer = settings.get("on_emission")

        def follow(emission: Any) -> None:
            assert self._last is not None, "a step has verified something"
            nodes = emission.path if emission.tree is not None else [-1]
            # Copies of these rows alone: a view would keep the logits of the whole tree.
            self.logits += self._last[nodes[: len(emission.token_ids)]].unbind()
            if outer is not None:
                outer(emission)

        return decoder.generate(token_ids, **{**settings, "on_emission": follow})

    def prefill(self, state: Any, token_ids: Tensor) -> TargetOutput:
        """Reads the prompt."""
        output = self._target.prefill(state, token_ids)
        self._last = output.logits[0]
        return output

    def verify(self, state: Any, tree: TokenTree) -> TargetOutput:
        """Reads a tree."""
        output = self._target.verify(state, tree)
        self._last = output.logits[0]
        return output
