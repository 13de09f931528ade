"""Drafts of several sequences, each explored by itself, as the draft of a batch."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from treeflash.proposal import Children, Proposal


@attrs.frozen(eq=False)
class SeparateRows(Proposal):
    """Asks each row's own draft about the nodes of that row.

    Attributes:
        rows: Drafts of one row each; they may differ in depth.
    """

    rows: Sequence[Proposal]

    @property
    def anchor(self) -> Tensor:
        """Int64 `[B]`."""
        return torch.cat([row.anchor for row in self.rows])

    @property
    def depth(self) -> int:
        """Levels of the deepest row."""
        return max(row.depth for row in self.rows)

    def root(self) -> Tensor:
        """Each row's root."""
        return torch.cat([row.root() for row in self.rows])

    def children(self, depth: int, handles: Tensor) -> Children:
        """Asks each row that is deep enough; the others have no children there."""
        asked = zip(self.rows, torch.split(handles, 1), strict=True)
        found = [row.children(depth, its) if depth <= row.depth else _none(its) for row, its in asked]
        width = max(part.token_ids.shape[2] for part in found)
        return Children(
            token_ids=torch.cat([_widened(part.token_ids, width, 0) for part in found]),
            log_probs=torch.cat([_widened(part.log_probs, width, -torch.inf) for part in found]),
            handles=torch.cat([_widened(part.handles, width, -1) for part in found]),
        )


def _none(handles: Tensor) -> Children:
    """No children at all."""
    ids = handles.new_zeros(*handles.shape, 0)
    return Children(ids, ids.float(), ids)


def _widened(values: Tensor, width: int, value: float) -> Tensor:
    """`[1, F, k]` to `[1, F, width]`."""
    return functional.pad(values, (0, width - values.shape[2]), value=value)
