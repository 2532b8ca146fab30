"""The KV cache of the batch that is being decoded, as a cache class of transformers. A row is one
running request.

Rows 0..n-1 are in use, without gaps. Position t of a row holds the keys and values of the row's
token t. One tensor holds the keys of all layers, and one tensor holds the values. Therefore adding
or moving a row takes one copy per tensor. Before a forward pass, the decoder sets the position of
each row's new token. Each layer then stores the keys and values of the new tokens at these
positions. After that, it reads all positions up to the end of the longest row. Positions beyond a
row's own length contain garbage, which the attention mask hides.

Rows with the same prompt may share the keys and values of this prompt (SharedPrefix). For these
rows, the two tensors then hold only the keys and values of the tokens after the prompt. Attention
must read both the shared prefix and the row's own tokens (`shared_attention`). Only the fused
forward pass can do this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

MIN_SLOTS = 8
MIN_CAPACITY = 128
WIDTH_STEP = 16
"""The width of masks and attention is rounded up to a multiple of this number. The rounding leads
to fewer different tensor shapes and wastes little memory."""


class CachedPrefix(NamedTuple):
    """Keys and values of the first tokens of a prompt. Each tensor is [layers, heads, tokens, head
    dim]."""

    keys: Tensor
    values: Tensor

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]

    def part(self, begin: int, end: int) -> CachedPrefix:
        """Return the keys and values of the tokens from position `begin` up to `end`, without a
        copy."""
        return CachedPrefix(self.keys[:, :, begin:end], self.values[:, :, begin:end])

    def copy(self) -> CachedPrefix:
        return CachedPrefix(self.keys.clone(), self.values.clone())


def joined(parts: Sequence[CachedPrefix]) -> CachedPrefix:
    """Return one copy of the keys and values of consecutive ranges of tokens, joined."""
    return CachedPrefix(
        torch.cat([part.keys for part in parts], 2), torch.cat([part.values for part in parts], 2)
    )


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """Keys and values of a prompt that several rows (running requests) share without a copy."""

    key: bytes
    """The `prefix_key` of the requests that share the prompt."""
    prefix: CachedPrefix


class SharedRows(NamedTuple):
    """The rows (running requests) that share the keys and values of one prompt."""

    shared: SharedPrefix
    rows: slice | Tensor
    """Indices of the rows: a slice if they are consecutive."""
    num_rows: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes, dtype and device of the keys and values that a model caches for one token."""

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
    """A KV cache of up to `max_rows` rows (running requests) with up to `max_length` tokens each.
    Its buffers grow by doubling."""

    def __init__(
        self,
        shape: CacheShape,
        max_rows: int,
        max_length: int,
        max_cells: int,
        *,
        has_static_width: bool = False,
    ) -> None:
        """Create an empty cache. If `has_static_width` is True, attention always reads whole
        buffers, so that tensor shapes change only when the buffers grow."""
        super().__init__(layers=[_KvCacheLayer(self, index) for index in range(shape.num_layers)])
        self.shape = shape
        self.max_rows = max_rows
        self.max_length = max_length
        self.max_cells = max_cells
        """Maximum of (number of rows) × (positions per row). A single row may exceed this
        maximum."""
        self._has_static_width = has_static_width
        self.num_rows = 0
        self.width = 0
        """Number of positions that attention reads in each row. The own tokens of every row fit
        into them."""
        self.length = 0
        """Number of tokens of the longest row, shared prefix included."""
        self._shared: list[SharedPrefix | None] = []
        """The shared prefix of each row."""
        self._shared_rows: list[SharedRows] | None = None
        """The computed value of `shared_rows`. None after the rows have changed."""
        self.own_positions = torch.zeros(0, dtype=torch.long, device=shape.device)
        """Position of each row's new token, counted from the end of the row's shared prefix."""
        self.cells = self.own_positions
        """Where the keys of the new tokens are stored, [rows * heads]: indices into the buffer of a
        layer, flattened over slots, heads and positions."""
        self.keys, self.values = self._buffers(0, 0)

    def fits(self, num_rows: int, length: int) -> bool:
        """Return True if buffers for `num_rows` rows of `length` tokens do not exceed `max_cells`,
        the maximum number of rows times tokens. A single row always fits."""
        slots, capacity = self._rounded(num_rows, length)
        return num_rows <= 1 or slots * capacity <= self.max_cells

    def reserve(self, num_rows: int, length: int) -> None:
        """Make sure that the buffers have room for `num_rows` rows of `length` tokens. The stored
        keys and values are kept."""
        slots, capacity = self.keys.shape[1], self.keys.shape[3]
        if num_rows <= slots and length <= capacity:
            return
        slots, capacity = self._rounded(max(num_rows, self.num_rows), max(length, self.width))
        old_keys, old_values = self.keys, self.values
        self.keys, self.values = self._buffers(slots, capacity)
        kept = min(old_keys.shape[3], capacity)
        self.keys[:, : self.num_rows, :, :kept] = old_keys[:, : self.num_rows, :, :kept]
        self.values[:, : self.num_rows, :, :kept] = old_values[:, : self.num_rows, :, :kept]

    def add_row(self, *parts: CachedPrefix, shared: SharedPrefix | None = None) -> None:
        """Append a row for a new request. The row begins with the shared prefix `shared`, if it is
        not None. The cached keys and values in `parts` follow. Without `shared` and `parts`, the
        row is empty."""
        num_tokens = sum(part.num_tokens for part in parts)
        self.reserve(self.num_rows + 1, num_tokens + 1)
        # If rows join or leave before the next forward pass, they must not cut off tokens of this
        # row.
        self.width = max(self.width, num_tokens)
        begin = 0
        for part in parts:
            end = begin + part.num_tokens
            self.keys[:, self.num_rows, :, begin:end] = part.keys
            self.values[:, self.num_rows, :, begin:end] = part.values
            begin = end
        self.num_rows += 1
        self._shared.append(shared)
        self._shared_rows = None

    def drop_row(self, row: int) -> None:
        """Remove a row (a running request) from the cache. The last row takes the index of the
        removed row."""
        last = self.num_rows - 1
        if row != last:
            self.keys[:, row, :, : self.width] = self.keys[:, last, :, : self.width]
            self.values[:, row, :, : self.width] = self.values[:, last, :, : self.width]
        self.num_rows = last
        self._shared[row] = self._shared[last]
        self._shared.pop()
        self._shared_rows = None
        if last == 0:
            self._release()

    def copy_of(self, row: int, begin: int, end: int) -> CachedPrefix:
        """Return a copy of the keys and values of a row's tokens, from position `begin` up to
        `end`. A row is one running request."""
        shared, parts = self._shared[row], list[CachedPrefix]()
        if shared is not None:
            parts.append(shared.prefix.part(begin, end))
        offset = self._offset(row)
        own = CachedPrefix(self.keys[:, row], self.values[:, row])
        parts.append(own.part(max(begin - offset, 0), max(end - offset, 0)))
        return joined(parts)

    def begin(self, positions: list[int]) -> Tensor:
        """Prepare a forward pass of one new token per row. `positions` has the position of each
        row's new token. Return the positions as a tensor, [rows]."""
        assert len(positions) == self.num_rows, "one position per row"
        own = [position - self._offset(row) for row, position in enumerate(positions)]
        self.length = max(positions) + 1
        longest = max(own) + 1
        self.reserve(self.num_rows, longest)
        capacity = self.keys.shape[3]
        rounded = min(-(-longest // WIDTH_STEP) * WIDTH_STEP, capacity)
        self.width = capacity if self._has_static_width else rounded
        device = self.shape.device
        self.own_positions = torch.tensor(own, device=device)
        heads = (
            torch.arange(self.num_rows * self.shape.num_heads, device=device) * self.keys.shape[3]
        )
        self.cells = (heads.view(self.num_rows, -1) + self.own_positions[:, None]).view(-1)
        return self.own_positions if own == positions else torch.tensor(positions, device=device)

    def shared_prefix(self, key: bytes) -> SharedPrefix | None:
        """Return the keys and values of the prompt with this key, if rows (running requests) share
        them now. Otherwise return None."""
        for shared in self._shared:
            if shared is not None and shared.key == key:
                return shared
        return None

    @property
    def shared_rows(self) -> list[SharedRows]:
        """The rows (running requests) that use the shared keys and values of a prompt, with one
        entry per shared prompt."""
        if self._shared_rows is None:
            by_prefix: dict[SharedPrefix, list[int]] = {}
            for row, shared in enumerate(self._shared):
                if shared is not None:
                    by_prefix.setdefault(shared, []).append(row)
            self._shared_rows = [
                SharedRows(shared, self._indices(rows), len(rows))
                for shared, rows in by_prefix.items()
            ]
        return self._shared_rows

    def _indices(self, rows: list[int]) -> slice | Tensor:
        if rows == list(range(rows[0], rows[-1] + 1)):
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, device=self.shape.device)

    def _offset(self, row: int) -> int:
        shared = self._shared[row]
        return 0 if shared is None else shared.prefix.num_tokens

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of one new token per row, [rows, heads, head dim] each. Return
        the keys and values at the first `width` positions of all rows, [rows, heads, width, head
        dim] each, without a copy. The longest row has at most `width` tokens, without its shared
        prefix."""
        return (
            self._store(self.keys[layer], keys),
            self._store(self.values[layer], values),
        )

    def _store(self, buffer: Tensor, new: Tensor) -> Tensor:
        dim = new.shape[-1]
        # Under autocast, rotated keys arrive in float32; attention would round them anyway.
        buffer.view(-1, dim).index_copy_(0, self.cells, new.reshape(-1, dim).to(buffer.dtype))
        return buffer[: self.num_rows, :, : self.width]

    def mask(self) -> Tensor:
        """Return the additive attention mask, [rows, 1, 1, width]. `width` is the number of
        positions that attention reads in each row. The mask hides the positions beyond each row's
        own length. Shared prefixes are stored elsewhere, and the mask does not cover them."""
        dtype = self.shape.dtype
        hidden = torch.arange(self.width, device=self.shape.device) > self.own_positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.shape.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None, None]

    def _rounded(self, num_rows: int, length: int) -> tuple[int, int]:
        """Return the size of buffers that hold `num_rows` rows of `length` tokens, as (number of
        rows, tokens per row).

        Both numbers are rounded up to a power of two, but not above `max_rows` and `max_length`.
        There are at least MIN_CAPACITY tokens per row. Buffers with this smallest number of tokens
        per row have at least MIN_SLOTS rows. Larger buffers have no minimum number of rows, to save
        memory.
        """
        capacity = max(MIN_CAPACITY, 1 << (length - 1).bit_length())
        least = MIN_SLOTS if capacity == MIN_CAPACITY else 1
        slots = max(least, 1 << (num_rows - 1).bit_length())
        return min(slots, self.max_rows), min(capacity, self.max_length)

    def _buffers(self, slots: int, capacity: int) -> tuple[Tensor, Tensor]:
        shape = self.shape
        size = (shape.num_layers, slots, shape.num_heads, capacity)
        # The memory must be zeroed: a masked position is still multiplied, and 0 * NaN is NaN.
        keys = torch.zeros(*size, shape.key_dim, dtype=shape.dtype, device=shape.device)
        return keys, torch.zeros(*size, shape.value_dim, dtype=shape.dtype, device=shape.device)

    def _release(self) -> None:
        """Free large buffers after the last row (running request) has been removed. Otherwise the
        memory of one long row would stay allocated."""
        self.width = 0
        if self.keys.shape[3] > MIN_CAPACITY * 8:
            self.keys, self.values = self._buffers(0, 0)


class _KvCacheLayer(CacheLayerMixin):
    """The KV cache of one layer of the model. It uses a part of the tensors of a KvCache."""

    is_sliding = False

    def __init__(self, cache: KvCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of one new token per row, [rows, heads, 1, head dim] each.
        Return the keys and values at the first `width` positions of all rows, [rows, heads, width,
        head dim] each."""
        return self._cache.store(self._index, key_states[:, :, 0], value_states[:, :, 0])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # The buffers belong to the KvCache.

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.width, 0

    def get_seq_length(self) -> int:
        return self._cache.width - 1

    def get_max_length(self) -> int:
        return self._cache.max_length

    get_max_cache_shape = get_max_length
    """The name of the same method in older versions of transformers."""
