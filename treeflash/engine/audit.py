"""Comparing a text decoded through trees with the target's own, token by token.

In low precision a tree and a single row round differently, and where the two likeliest tokens nearly tie,
either may come out. An audit tells that from a fault: it looks at the scores that both runs chose by, where
they first chose otherwise.
"""

from collections.abc import Sequence
from typing import Any

import attrs
from torch import Tensor

from treeflash.engine.decoder import Decoder
from treeflash.engine.generation import Generation
from treeflash.engine.stopwatch import Stopwatch
from treeflash.rounding import difference, largest_difference
from treeflash.sampling import Draws
from treeflash.target_interface import Target, identity
from treeflash.tree import TokenTree
from treeflash.types import TargetOutput

NEAR_TIE, MISMATCH, LOSSY = "near-tie", "mismatch", "lossy"
_PASS = "pass"


@attrs.frozen
class Audit:
    """What a comparison came to.

    Attributes:
        identical: Whether both texts are the same; None when they were not compared.
        first_difference: Index of the first new token that is not; None when there is none.
        kind: "near-tie" when the runs' logits there are no further apart than rounding takes them
            (`treeflash.rounding`), and in both runs both tokens are no further below the best than twice the
            greatest difference between the runs' scores; otherwise "mismatch"; None when identical. "lossy"
            when the verifier is lossy on purpose, and there is nothing to compare.
    """

    identical: bool | None
    first_difference: int | None
    kind: str | None


def audited(decoder: Decoder, token_ids: Sequence[int] | Tensor, **settings: Any) -> tuple[Generation, Audit]:
    """Decodes a text, and plainly once more, unless the verifier is lossy on purpose.

    Args:
        decoder: The decoder.
        token_ids: The prompt, as in `Decoder.generate`.
        **settings: As in `Decoder.generate`.

    Returns:
        The text, and how it compares with the plain one.
    """
    if not decoder.lossless:
        return decoder.generate(token_ids, **settings), Audit(None, None, LOSSY)
    through_trees = recorded(decoder, token_ids, **settings)
    plain = recorded(Decoder(decoder.target), token_ids, **{**settings, "on_emission": None})
    draws = Draws(settings.get("temperature", 0.0), settings.get("seed", 0), (settings.get("sequence", 0),))
    return through_trees.generation, compare(through_trees, plain, draws)


@attrs.frozen(eq=False)
class Recorded:
    """A text, and what it was chosen by.

    Attributes:
        generation: The text.
        logits: For each new token the logits `[V]` that chose it.
        pass_seconds: Time of the target's own passes, all steps' together; None when stages are not timed, or
            there was no step.
    """

    generation: Generation
    logits: Sequence[Tensor]
    pass_seconds: float | None = None


def recorded(decoder: Decoder, token_ids: Sequence[int] | Tensor, **settings: Any) -> Recorded:
    """Decodes a text and keeps the logits that chose its tokens; what that takes is in no step's time.

    Args:
        decoder: The decoder.
        token_ids: The prompt, as in `Decoder.generate`.
        **settings: As in `Decoder.generate`.

    Returns:
        The text, its logits, and the time of the target's passes.
    """
    recorder = _Recorder(decoder.target, time_passes=bool(settings.get("time_stages")))
    try:
        generation = recorder.run(attrs.evolve(decoder, target=recorder), token_ids, settings)
    finally:
        # Parts are bound to one target at a time: back to their own.
        attrs.evolve(decoder)
    return Recorded(generation, recorder.logits, recorder.watch.take().get(_PASS))


def compare(one: Recorded, other: Recorded, draws: Draws) -> Audit:
    """Compares two runs over one prompt.

    Args:
        one: A run.
        other: Another.
        draws: How both chose.

    Returns:
        The result.
    """
    mine, theirs = one.generation.token_ids, other.generation.token_ids
    place = parting(mine, theirs)
    if place is None:
        if len(mine) == len(theirs):
            return Audit(True, None, None)
        return Audit(False, min(len(mine), len(theirs)), MISMATCH)
    logits = [run.logits[place] for run in (one, other)]
    # Said so that a difference that is no number is too large.
    if not difference(*logits) <= largest_difference(logits[0].dtype):
        return Audit(False, place, MISMATCH)
    position = one.generation.prompt_tokens + place - 1
    pair = [mine[place], theirs[place]]
    scores = [draws.scores(row, position) for row in logits]
    apart = float((scores[0] - scores[1]).abs().max())
    for run in scores:
        # Three and more may tie: in bfloat16 many scores are equal.
        if float((run.max() - run[pair]).max()) > 2 * apart:
            return Audit(False, place, MISMATCH)
    return Audit(False, place, NEAR_TIE)


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part.

    Args:
        one: Token ids.
        other: Others.

    Returns:
        The first place where both have a token and not the same; None when there is none.
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), None)


class _Recorder:
    """A target that keeps the logits each new token was chosen by, and the time that its passes took.

    Args:
        target: What it stands for.
        time_passes: Wait for a GPU around each pass.
    """

    def __init__(self, target: Target, *, time_passes: bool) -> None:
        self._target = target
        self.watch = Stopwatch(target.device, synchronise=time_passes)
        self.logits: list[Tensor] = []
        self._last: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    @property
    def identity(self) -> object:
        """That of the target it stands for."""
        return identity(self._target)

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
        self.watch.start()
        output = self._target.verify(state, tree)
        self.watch.lap(_PASS)
        self._last = output.logits[0]
        return output
