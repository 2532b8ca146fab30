"""The keys and values of prompts while they are prefilled, as a cache class of transformers.

The tensors are allocated once for all tokens. Therefore the tokens that are prefilled already are
not copied when further tokens are prefilled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from fakevllm_server.backends.embedded.decode.kv_cache import CachedPrefix, CacheShape


class PrefillCache(Cache):
    """The keys and values of `num_rows` prompts with at most `max_length` tokens each. At any time,
    the cache has the same number of tokens of each prompt. This number is `length`."""

    def __init__(self, shape: CacheShape, num_rows: int, max_length: int) -> None:
        super().__init__(layers=[_Layer(self, index) for index in range(shape.num_layers)])
        self.max_length = max_length
        self.length = 0
        """Number of tokens before the current piece. The caller increases this number after each
        piece."""
        size = (shape.num_layers, num_rows, shape.num_heads, max_length)
        self.filled = CachedPrefix(
            torch.empty(*size, shape.key_dim, dtype=shape.dtype, device=shape.device),
            torch.empty(*size, shape.value_dim, dtype=shape.dtype, device=shape.device),
        )

    def fill(self, row: int, parts: Sequence[CachedPrefix]) -> None:
        """Copy the keys and values of a prompt's first tokens into this cache. `parts` contains
        these keys and values, in the order of the tokens."""
        begin = 0
        for part in parts:
            end = begin + part.num_tokens
            self.filled.keys[:, row, :, begin:end] = part.keys
            self.filled.values[:, row, :, begin:end] = part.values
            begin = end
        self.length = begin

    def row(self, row: int) -> CachedPrefix:
        """Return the cache's tensors for the keys and values of one prompt, as views. Only the
        first `length` tokens are filled."""
        return CachedPrefix(self.filled.keys[:, row], self.filled.values[:, row])

    def prefix(self, row: int, length: int) -> CachedPrefix:
        """Return a copy of the cached keys and values of a prompt's first `length` tokens."""
        return self.row(row).part(0, length).copy()


class _Layer(CacheLayerMixin):
    """One layer of the model in a PrefillCache: views of the cache's keys and values for this
    layer."""

    is_sliding = False

    def __init__(self, cache: PrefillCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the next tokens of all prompts, [prompts, heads, tokens,
        head dim] each. Return the keys and values of all tokens so far, including these."""
        begin = self._cache.length
        end = begin + key_states.shape[2]
        keys, values = (tensor[self._index] for tensor in self._cache.filled)
        # Under autocast, rotated keys arrive in float32; attention would round them anyway.
        keys[:, :, begin:end] = key_states
        values[:, :, begin:end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # The tensors belong to the PrefillCache.

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return self._cache.max_length

    get_max_cache_shape = get_max_length
    """The name of the same method in older versions of transformers."""
