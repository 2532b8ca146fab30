"""The keys and values of all rows being decoded, in the form transformers' attention layers ask
for.

Rows 0..n-1 are in use, without gaps. Position t of a row holds its token t. One tensor carries all
layers, so that a row joins, moves or leaves in one copy. The decoder tells the cache each row's
position before a forward pass; the layers then store there and read back everything up to the
longest row. What lies beyond a row's own length is garbage, and hidden by the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

MIN_SLOTS = 8
MIN_CAPACITY = 128
WIDTH_STEP = 16
"""Masks and attention see lengths in this step: fewer shapes, at little waste."""


class CachedPrefix(NamedTuple):
    """Keys and values of a prompt: [layers, heads, tokens, head dim]."""

    keys: Tensor
    values: Tensor

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one position of one row takes."""

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_position(self) -> int:
        return (
            self.num_layers * self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize
        )


class KvCache(Cache):
    """Grows by doubling up to `max_rows` x `max_length`."""

    def __init__(self, shape: CacheShape, max_rows: int, max_length: int, max_cells: int) -> None:
        super().__init__(layers=[_RowLayer(self, index) for index in range(shape.num_layers)])
        self.shape = shape
        self.max_rows = max_rows
        self.max_length = max_length
        self.max_cells = max_cells
        """Most rows x positions; a single row may exceed it."""
        self.num_rows = 0
        self.width = 0
        self.positions = torch.zeros(0, dtype=torch.long, device=shape.device)
        self.row_index = self.positions
        self.keys, self.values = self._buffers(0, 0)

    def fits(self, num_rows: int, length: int) -> bool:
        slots, capacity = self._rounded(num_rows, length)
        return num_rows <= 1 or slots * capacity <= self.max_cells

    def reserve(self, num_rows: int, length: int) -> None:
        """Room for `num_rows` rows of `length` tokens; what is stored stays."""
        slots, capacity = self.keys.shape[1], self.keys.shape[3]
        if num_rows <= slots and length <= capacity:
            return
        slots, capacity = self._rounded(max(num_rows, self.num_rows), max(length, self.width))
        old_keys, old_values = self.keys, self.values
        self.keys, self.values = self._buffers(slots, capacity)
        kept = min(old_keys.shape[3], capacity)
        self.keys[:, : self.num_rows, :, :kept] = old_keys[:, : self.num_rows, :, :kept]
        self.values[:, : self.num_rows, :, :kept] = old_values[:, : self.num_rows, :, :kept]

    def add_row(self, prefix: CachedPrefix | None) -> None:
        """The new row is the last one. None is the empty prefix."""
        length = 0 if prefix is None else prefix.num_tokens
        self.reserve(self.num_rows + 1, length + 1)
        if prefix is not None:
            self.keys[:, self.num_rows, :, :length] = prefix.keys
            self.values[:, self.num_rows, :, :length] = prefix.values
        self.num_rows += 1

    def drop_row(self, row: int) -> None:
        """The last row takes the place of the one dropped."""
        last = self.num_rows - 1
        if row != last:
            self.keys[:, row, :, : self.width] = self.keys[:, last, :, : self.width]
            self.values[:, row, :, : self.width] = self.values[:, last, :, : self.width]
        self.num_rows = last
        if last == 0:
            self._release()

    def begin(self, positions: list[int]) -> Tensor:
        """Sets where each row's next token goes, and returns those positions [rows]."""
        assert len(positions) == self.num_rows, "one position per row"
        longest = max(positions) + 1
        self.reserve(self.num_rows, longest)
        self.width = min(-(-longest // WIDTH_STEP) * WIDTH_STEP, self.keys.shape[3])
        self.positions = torch.tensor(positions, device=self.shape.device)
        self.row_index = torch.arange(self.num_rows, device=self.shape.device)
        return self.positions

    def mask(self) -> Tensor:
        """Additive mask [rows, 1, 1, width]: each row sees its own tokens."""
        dtype = self.shape.dtype
        hidden = torch.arange(self.width, device=self.shape.device) > self.positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.shape.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None, None]

    def _rounded(self, num_rows: int, length: int) -> tuple[int, int]:
        """Slots and capacity to allocate; long rows are dear, so they get no empty neighbours."""
        capacity = max(MIN_CAPACITY, 1 << (length - 1).bit_length())
        least = MIN_SLOTS if capacity == MIN_CAPACITY else 1
        slots = max(least, 1 << (num_rows - 1).bit_length())
        return min(slots, self.max_rows), min(capacity, self.max_length)

    def _buffers(self, slots: int, capacity: int) -> tuple[Tensor, Tensor]:
        shape = self.shape
        size = (shape.num_layers, slots, shape.num_heads, capacity)
        # Zeros, not empty memory: a masked position is still multiplied, and 0 * NaN is NaN.
        keys = torch.zeros(*size, shape.key_dim, dtype=shape.dtype, device=shape.device)
        return keys, torch.zeros(*size, shape.value_dim, dtype=shape.dtype, device=shape.device)

    def _release(self) -> None:
        """One long row must not keep its memory for ever."""
        self.width = 0
        if self.keys.shape[3] > MIN_CAPACITY * 8:
            self.keys, self.values = self._buffers(0, 0)


class _RowLayer(CacheLayerMixin):
    """One layer's view of the rows."""

    is_sliding = False

    def __init__(self, cache: KvCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores one token per row ([rows, heads, 1, dim]); returns all up to the longest row."""
        cache = self._cache
        keys, values = cache.keys[self._index], cache.values[self._index]
        # Under autocast rotated keys come in float32, and attention rounds them before it looks.
        keys[cache.row_index, :, cache.positions] = key_states[:, :, 0].to(keys.dtype)
        values[cache.row_index, :, cache.positions] = value_states[:, :, 0].to(values.dtype)
        rows, width = cache.num_rows, cache.width
        return keys[:rows, :, :width], values[:rows, :, :width]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # the buffers belong to the KvCache

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.width, 0

    def get_seq_length(self) -> int:
        return self._cache.width - 1

    def get_max_cache_shape(self) -> int:
        return self._cache.max_length
