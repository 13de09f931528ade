"""Training blocks: which positions open one, what it sees, and what it should say.

Where blocks stand is worked out on the host, from the lengths of the texts alone: nothing waits for a GPU.
"""

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
        text: The row.
        anchors: Index of each block's anchor in the row, ascending: in its text's answer, or just before it.
        block_size: Slots, the anchor's included.
    """

    text: PackedText
    anchors: Sequence[int]
    block_size: int

    @property
    def anchor_rows(self) -> Tensor:
        """The anchors, int64 `[A]` on the row's device."""
        return torch.tensor(self.anchors, dtype=torch.int64).to(self.text.token_ids.device, non_blocking=True)

    def rows(self) -> Tensor:
        """Index in the row of each slot, int64 `[A, block_size]`, cut at the row's end."""
        offsets = torch.arange(self.block_size, device=self.text.token_ids.device)
        return (self.anchor_rows[:, None] + offsets).clamp(max=self.text.bounds[-1] - 1)

    def positions(self) -> Tensor:
        """Position of each slot in its own text, int64 `[A, block_size]`, running on past its end."""
        offsets = torch.arange(self.block_size, device=self.text.token_ids.device)
        return self.text.positions[self.anchor_rows][:, None] + offsets

    def left(self) -> Tensor:
        """Tokens that each anchor's text has after it, int64 `[A]` on the CPU."""
        found = [self.text.end_behind(anchor) - 1 - anchor for anchor in self.anchors]
        return torch.tensor(found, dtype=torch.int64)

    def has_label(self) -> Tensor:
        """Bool `[A, P]` on the CPU: whether the text goes on to each drafted slot."""
        return torch.arange(1, self.block_size)[None] <= self.left()[:, None]

    def pieces(self) -> list[Piece]:
        """Who sees whom, a few neighbouring blocks at a time.

        A block sees its text's context strictly before its anchor, and all of itself; blocks do not see
        each other.

        Returns:
            Pieces that cover all slots in order.
        """
        size, device = self.block_size, self.text.token_ids.device
        found = []
        for begin, end in self._groups():
            anchors = self.anchors[begin:end]
            first, last = self.text.begin_before(anchors[0]), anchors[-1]
            block = torch.arange(len(anchors)).repeat_interleave(size)
            before = torch.arange(first, last)[None] < torch.tensor(anchors)[block][:, None]
            visible = torch.cat([before, block[:, None] == block[None]], dim=1)
            slots = slice(begin * size, end * size)
            found.append(Piece(slots, slice(first, last), visible.to(device, non_blocking=True)))
        return found

    def _groups(self) -> list[tuple[int, int]]:
        """Runs of neighbouring anchors of one text, none longer than a group."""
        groups: list[tuple[int, int]] = []
        begin = 0
        for index in range(1, len(self.anchors) + 1):
            ends = index == len(self.anchors) or index - begin == _GROUP
            if ends or self.anchors[index] >= self.text.end_behind(self.anchors[begin]):
                groups.append((begin, index))
                begin = index
        return groups


def draw_anchors(text: PackedText, count: int, generators: Sequence[torch.Generator]) -> list[int]:
    """Draws positions that open a block: those whose next token the target wrote.

    Args:
        text: The row.
        count: Anchors wanted in each text; fewer when it has fewer.
        generators: Of each text's draw, on the CPU.

    Returns:
        Ascending, distinct.
    """
    drawn: list[int] = []
    for answer, end, generator in zip(text.answers, text.bounds[1:], generators, strict=True):
        chosen = torch.randperm(end - answer, generator=generator)[:count]
        drawn += (answer - 1 + chosen.sort().values).tolist()
    return drawn


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
