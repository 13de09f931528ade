"""A key/value cache that is written and rewound in place, and grows with its text.

The rows up to `length` are committed: row r holds position r. The rows of a tree are written behind
them, all at once or level by level, and `keep` moves those of the accepted path up.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from treeflash.errors import InputError
from treeflash.room import empty_rows, enlarged, rows_to_make


@attrs.define
class Extent:
    """Shared by the layers of one cache.

    Attributes:
        capacity: Rows that can ever be needed.
        rows: Rows that there is room for now.
        num_layers: Layers that share it.
        lengths: int64 `[B]` on the CPU: committed rows of each sequence.
        end: Where the next pass writes. Every layer asks, so that it is worked out once a pass.
    """

    capacity: int
    rows: int
    num_layers: int
    lengths: Tensor
    end: int = 0

    @property
    def length(self) -> int:
        """Committed rows of the longest sequence."""
        return int(self.lengths.max())

    def commit(self, lengths: Tensor) -> None:
        """Sets the committed rows; the next pass writes behind them."""
        self.lengths = lengths
        self.end = self.length


class TreeCacheLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """Keys and values of one attention layer, `[B, heads, rows, d]`.

    Args:
        extent: Shared with the other layers.
    """

    is_sliding = False

    def __init__(self, extent: Extent) -> None:
        super().__init__()
        self.extent = extent

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates on first use, when the shapes are known.

        Raises:
            InputError: When the memory cannot hold as much for all layers.
        """
        rows, times = self.extent.rows, self._times
        self.keys, self.values = empty_rows(key_states, rows, times), empty_rows(value_states, rows, times)
        self.is_initialized = True

    def resize(self, rows: int, kept: int) -> None:
        """Makes room for just `rows` rows; the first `kept` stay.

        Raises:
            InputError: When there is not enough memory; keys and values then stay as they are, both.
        """
        if self.is_initialized and any(states.shape[-2] != rows for states in (self.keys, self.values)):
            keys = enlarged(self.keys, rows, kept, self._times)
            self.keys, self.values = keys, enlarged(self.values, rows, kept, self._times)

    @property
    def _times(self) -> int:
        """Tensors of all layers together."""
        return 2 * self.extent.num_layers

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes `[B, heads, n, d]` behind the rows to be left; gives views of all rows up to there."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, count = self.extent.end, key_states.shape[-2]
        self.keys.narrow(-2, start, count).copy_(key_states)
        self.values.narrow(-2, start, count).copy_(value_states)
        return self.keys.narrow(-2, 0, start + count), self.values.narrow(-2, 0, start + count)

    def keep(self, rows: Tensor, start: int) -> None:
        """Moves rows int64 `[n]` to `start` and on."""
        end = start + rows.shape[0]
        for states in (self.keys, self.values):
            states[..., start:end, :] = states.index_select(-2, rows.to(states.device))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Rows visible to `query_length` new queries, and the first of them."""
        return self.extent.end + query_length, 0

    def get_seq_length(self) -> int:
        """Committed rows."""
        return self.extent.length

    def get_max_length(self) -> int:
        """Rows that can ever be needed."""
        return self.extent.capacity


class TreeCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The cache of all layers.

    Args:
        num_layers: Layers that keep keys and values.
        capacity: Rows that can ever be needed. Room is made as passes come to need it.
        batch_size: Sequences.
    """

    def __init__(self, num_layers: int, capacity: int, batch_size: int = 1) -> None:
        lengths = torch.zeros(batch_size, dtype=torch.int64)
        self.extent = Extent(capacity, rows_to_make(0, 0, capacity), num_layers, lengths)
        super().__init__(layers=[TreeCacheLayer(self.extent) for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """Committed rows of the longest sequence."""
        return self.extent.length

    def reserve(self, rows: int, behind: int = 0) -> None:
        """Says where the next pass writes, and makes room for it.

        Args:
            rows: Rows it writes.
            behind: Rows behind the committed ones that it leaves as they are: a tree's upper levels, when
                its next one is read.

        Raises:
            InputError: When there is none to be had.
        """
        extent = self.extent
        extent.end = self.length + behind
        needed = extent.end + rows
        if needed > extent.capacity:
            raise InputError(
                f"the cache has room for {extent.capacity} positions; "
                f"expected at most {extent.capacity - extent.end} more, found {rows}"
            )
        if needed > extent.rows:
            try:
                self._resize(rows_to_make(needed, extent.rows, extent.capacity))
                return
            except InputError:
                pass
            # Outside the handler, since the error holds what the failed attempt allocated. Layers that were
            # enlarged give back what is not needed before the others grow.
            self._resize(needed)

    def _resize(self, rows: int) -> None:
        """Makes room for just `rows` rows in all layers."""
        for layer in self.layers:
            layer.resize(rows, self.extent.end)
        self.extent.rows = rows

    def append(self, rows: int) -> None:
        """Commits the next `rows` rows, which a forward has just written."""
        self.extent.commit(self.extent.lengths + rows)

    def keep(self, path: Sequence[int]) -> None:
        """Commits the rows of one path of the tree written last.

        Args:
            path: Node indices, ascending.
        """
        start = self.length
        moved = next((step for step, node in enumerate(path) if node != step), len(path))
        if moved < len(path):
            rows = torch.tensor([start + node for node in path[moved:]])
            rows = rows.to(self.layers[0].keys.device, non_blocking=True)
            for layer in self.layers:
                layer.keep(rows, start + moved)
        self.extent.commit(self.extent.lengths + len(path))

    def rewind(self, lengths: Tensor) -> None:
        """Forgets the rows from `lengths`, int64 `[B]`, on."""
        self.extent.commit(torch.minimum(self.extent.lengths, lengths))
