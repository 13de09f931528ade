"""Training blocks: which positions open one, what it sees, and what it should say."""

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class PackedText:
    """Several texts side by side in one row, as the target read them.

    Attributes:
        token_ids: int64 `[S]`.
        text_of: int64 `[S]`: which text each position belongs to.
        positions: int64 `[S]`: each position in its own text, from 0.
        is_answer: bool `[S]`: true where the token was written by the target.
    """

    token_ids: Tensor
    text_of: Tensor
    positions: Tensor
    is_answer: Tensor

    @classmethod
    def pack(cls, texts: list[tuple[list[int], list[int]]]) -> "PackedText":
        """Puts texts side by side.

        Args:
            texts: Prompt and answer ids of each.

        Returns:
            The row.
        """
        parts: list[list[Tensor]] = [[], [], [], []]
        for number, (prompt, answer) in enumerate(texts):
            length = len(prompt) + len(answer)
            parts[0].append(torch.tensor(prompt + answer))
            parts[1].append(torch.full((length,), number))
            parts[2].append(torch.arange(length))
            parts[3].append(torch.arange(length) >= len(prompt))
        return cls(*(torch.cat(part) for part in parts))


@attrs.frozen(eq=False)
class Blocks:
    """Blocks to draft along a packed row.

    Slot k of a block stands k positions behind its anchor; slots 1 to P are drafted. A slot past the end of
    its text has no label.

    Attributes:
        anchors: int64 `[A]`: index of each block's anchor in the row, its text's answer or the position
            before it.
        block_size: Slots, the anchor's included.
    """

    anchors: Tensor
    block_size: int

    def rows(self, text: PackedText) -> Tensor:
        """Index in the row of each slot, int64 `[A, block_size]`, cut at the row's end."""
        offsets = torch.arange(self.block_size, device=self.anchors.device)
        return (self.anchors[:, None] + offsets).clamp(max=text.token_ids.shape[0] - 1)

    def positions(self, text: PackedText) -> Tensor:
        """Position of each slot in its own text, int64 `[A, block_size]`, running on past its end."""
        offsets = torch.arange(self.block_size, device=self.anchors.device)
        return text.positions[self.anchors][:, None] + offsets

    def has_label(self, text: PackedText) -> Tensor:
        """Bool `[A, P]`: whether the text goes on to each drafted slot, as written by the target."""
        rows = self.rows(text)[:, 1:]
        offsets = torch.arange(1, self.block_size, device=rows.device)
        inside = self.anchors[:, None] + offsets < text.token_ids.shape[0]
        same = text.text_of[rows] == text.text_of[self.anchors][:, None]
        return inside & same & text.is_answer[rows]

    def visibility(self, text: PackedText) -> Tensor:
        """Who sees whom, bool `[A * block_size, S + A * block_size]`.

        A block sees its text's context strictly before its anchor, and all of itself; blocks do not see
        each other.
        """
        count = self.anchors.shape[0]
        index = torch.arange(text.token_ids.shape[0], device=self.anchors.device)
        of_text = text.text_of[None, :] == text.text_of[self.anchors][:, None]
        context = of_text & (index[None, :] < self.anchors[:, None])
        context = context.repeat_interleave(self.block_size, dim=0)
        own = torch.eye(count, dtype=torch.bool, device=self.anchors.device)
        own = own.repeat_interleave(self.block_size, 0).repeat_interleave(self.block_size, 1)
        return torch.cat([context, own], dim=1)


def draw_anchors(text: PackedText, count: int, generator: torch.Generator) -> Tensor:
    """Draws positions that open a block: those whose next token the target wrote.

    Args:
        text: The row.
        count: Anchors wanted; fewer when the row has fewer.
        generator: Of the draw, on the CPU.

    Returns:
        int64 `[A]`, ascending, distinct.
    """
    follows = torch.zeros_like(text.is_answer)
    follows[:-1] = text.is_answer[1:] & (text.text_of[1:] == text.text_of[:-1])
    eligible = follows.nonzero()[:, 0].cpu()
    chosen = torch.randperm(eligible.shape[0], generator=generator)[:count]
    return eligible[chosen].sort().values.to(text.token_ids.device)


def position_weights(draft_length: int, decay: float | None) -> Tensor:
    """How much each drafted slot counts: `exp(-(k - 1) / decay)` for slot k.

    Args:
        draft_length: P.
        decay: None counts all alike.

    Returns:
        float32 `[P]`.
    """
    slots = torch.arange(draft_length, dtype=torch.float32)
    return torch.ones(draft_length) if decay is None else torch.exp(-slots / decay)
