"""Training blocks: which positions open one, what it sees, and what it should say."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from treeflash.components.drafters.dflash_network import Piece
from treeflash.packed_text import PackedText

# Blocks whose attention is computed together: over one range of keys, of which each sees a part.
_GROUP = 16


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

    def pieces(self, text: PackedText) -> list[Piece]:
        """Who sees whom, a few neighbouring blocks at a time.

        A block sees its text's context strictly before its anchor, and all of itself; blocks do not see
        each other.

        Args:
            text: The row.

        Returns:
            Pieces that cover all slots in order.
        """
        size, found = self.block_size, []
        anchors = self.anchors.tolist()
        offsets = torch.arange(_GROUP * size, device=self.anchors.device) // size
        for begin, end in _groups(anchors, text.bounds):
            first = max(bound for bound in text.bounds if bound <= anchors[begin])
            context = torch.arange(first, anchors[end - 1], device=self.anchors.device)
            block = offsets[: (end - begin) * size]
            before = context[None, :] < self.anchors[begin:end][block][:, None]
            own = block[:, None] == block[None, :]
            found.append(
                Piece(
                    slots=slice(begin * size, end * size),
                    context=slice(first, anchors[end - 1]),
                    visible=torch.cat([before, own], dim=1),
                )
            )
        return found


def _groups(anchors: Sequence[int], bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring anchors of one text, none longer than a group."""
    groups: list[tuple[int, int]] = []
    begin, number = 0, 0
    for index, anchor in enumerate(anchors):
        crossed = anchor >= bounds[number + 1]
        while anchor >= bounds[number + 1]:
            number += 1
        if index > begin and (crossed or index - begin == _GROUP):
            groups.append((begin, index))
            begin = index
    return [*groups, (begin, len(anchors))] if anchors else []


def draw_anchors(text: PackedText, count: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Draws positions that open a block: those whose next token the target wrote.

    Args:
        text: The row.
        count: Anchors wanted in each text; fewer when it has fewer.
        generators: Of each text's draw, on the CPU.

    Returns:
        int64 `[A]`, ascending, distinct.
    """
    is_answer = text.is_answer.cpu()
    drawn = []
    for first, end, generator in zip(text.bounds, text.bounds[1:], generators, strict=False):
        eligible = first + is_answer[first + 1 : end].nonzero()[:, 0]
        chosen = torch.randperm(eligible.shape[0], generator=generator)[:count]
        drawn.append(eligible[chosen].sort().values)
    return torch.cat(drawn).to(text.token_ids.device)


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
