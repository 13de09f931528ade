"""What the drafter remembers of its sequences."""

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from treeflash.room import rows_to_make


@attrs.define(eq=False)
class Eagle3State:
    """A row for each token whose successor may be drafted.

    A token goes with the target's state at the position before it, so row t holds what token t needs of
    position t - 1. That of the anchor waits for nothing but the anchor: its state is there, its token is not.
    Row 0 has no state before it and is never looked at.

    Attributes:
        states: `[B, rows, D]`: the fused state of position t - 1 in row t.
        cache: `[2, B, heads, rows, d]`: keys and values of token t and that state. Rows behind the committed
            ones are scratch room for drafts.
        lengths: int64 `[B]` on the CPU: tokens known. The anchor's row.
    """

    states: Tensor
    cache: Tensor
    lengths: Tensor

    def make_room(self, rows: int) -> None:
        """Makes sure that the cache has so many rows; what is in it stays."""
        self.cache = _with_room(self.cache, rows)

    def make_room_for_text(self, count: int) -> None:
        """Makes sure that `count` more tokens and an anchor have a row each."""
        rows = int(self.lengths.max()) + count + 1
        self.states = _with_room(self.states, rows)
        self.make_room(rows)

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Index of the next rows of each sequence: int64 `[B, 1]` and `[B, count]` on the device."""
        device = self.cache.device
        rows = self.lengths[:, None] + torch.arange(count)
        return torch.arange(len(rows), device=device)[:, None], rows.to(device, non_blocking=True)

    def write(self, at: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        """Writes keys and values `[B, heads, count, d]` into rows from `rows`."""
        batch, rows = at
        for room, written in zip(self.cache, (keys, values), strict=True):
            room[batch, :, rows] = written.transpose(1, 2)


def _with_room(states: Tensor, rows: int) -> Tensor:
    """`[..., have, d]` with at least so many rows."""
    have = states.shape[-2]
    if rows <= have:
        return states
    # Zeros, since a mask does not keep a NaN out.
    return functional.pad(states, (0, 0, 0, rows_to_make(rows, have) - have))
