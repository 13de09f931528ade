"""Several texts in one row, and what the target made of them: what a drafter is trained on."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class PackedText:
    """Several texts side by side in one row, as the target read them.

    Attributes:
        token_ids: int64 `[S]`.
        text_of: int64 `[S]`: which text each position belongs to, ascending.
        positions: int64 `[S]`: each position in its own text, from 0.
        bounds: Where in the row each text begins, and the row's end.
        answers: Where in the row each text's answer begins: its prompt has at least one token.
    """

    token_ids: Tensor
    text_of: Tensor
    positions: Tensor
    bounds: tuple[int, ...]
    answers: tuple[int, ...]

    @classmethod
    def pack(
        cls,
        texts: Sequence[tuple[Sequence[int] | Tensor, Sequence[int] | Tensor]],
        device: torch.device | str = "cpu",
    ) -> Self:
        """Puts texts side by side.

        Args:
            texts: Prompt and answer ids of each, neither empty; tensors are integers `[n]` on the CPU.
            device: Where the row goes.

        Returns:
            The row.
        """
        bounds, answers = [0], []
        for prompt, answer in texts:
            answers.append(bounds[-1] + len(prompt))
            bounds.append(answers[-1] + len(answer))
        lengths = torch.tensor([end - begin for begin, end in pairwise(bounds)])
        text_of = torch.arange(len(texts)).repeat_interleave(lengths)
        positions = torch.arange(bounds[-1]) - torch.tensor(bounds)[text_of]
        ids = torch.cat([torch.as_tensor(part, dtype=torch.int64) for text in texts for part in text])
        ids, text_of, positions = (part.to(device, non_blocking=True) for part in (ids, text_of, positions))
        return cls(ids, text_of, positions, tuple(bounds), tuple(answers))

    def begin_before(self, place: int) -> int:
        """Where the text begins that a place of the row lies in."""
        return self.bounds[bisect_right(self.bounds, place) - 1]

    def end_behind(self, place: int) -> int:
        """Where the text ends that a place of the row lies in."""
        return self.bounds[bisect_right(self.bounds, place)]

    def causal_visibility(self) -> Tensor:
        """Who sees whom when the target reads the row: bool `[S, S]`, each text by itself."""
        same = self.text_of[:, None] == self.text_of[None, :]
        return same & (self.positions[None, :] <= self.positions[:, None])


@attrs.frozen(eq=False)
class ReadText:
    """A packed row and what the target made of it.

    Attributes:
        text: The row.
        taps: `[S, F]`: the tapped layers' outputs side by side.
        normed: `[S, D]`: the states behind the target's final norm. Position i's gives the distribution of
            the token at i + 1.
    """

    text: PackedText
    taps: Tensor
    normed: Tensor
