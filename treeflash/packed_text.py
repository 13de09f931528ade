"""Several texts in one row, and what the target made of them: what a drafter is trained on."""

from collections.abc import Sequence
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
        is_answer: bool `[S]`: true where the token was written by the target.
        bounds: Where in the row each text begins, and the row's end.
    """

    token_ids: Tensor
    text_of: Tensor
    positions: Tensor
    is_answer: Tensor
    bounds: tuple[int, ...]

    @classmethod
    def pack(
        cls, texts: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device | str = "cpu"
    ) -> Self:
        """Puts texts side by side.

        Args:
            texts: Prompt and answer ids of each.
            device: Where the row goes.

        Returns:
            The row.
        """
        parts: list[list[Tensor]] = [[], [], [], []]
        bounds = [0]
        for number, (prompt, answer) in enumerate(texts):
            length = len(prompt) + len(answer)
            parts[0].append(torch.tensor([*prompt, *answer]))
            parts[1].append(torch.full((length,), number))
            parts[2].append(torch.arange(length))
            parts[3].append(torch.arange(length) >= len(prompt))
            bounds.append(bounds[-1] + length)
        ids, text_of, positions, is_answer = (torch.cat(part).to(device) for part in parts)
        return cls(ids, text_of, positions, is_answer, tuple(bounds))

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
