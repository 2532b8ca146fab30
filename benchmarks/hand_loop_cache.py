"""The KV cache of the hand loop in `benchmarks.embedded_decode`: tensors that are allocated once,
for rows of equal length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


def make_cache(config: Any, max_length: int) -> Cache:
    """Return a cache for the model of `config` with at most `max_length` tokens per row."""
    return Cache(layers=[_Layer(max_length) for _ in range(config.num_hidden_layers)])


class _Layer(CacheLayerMixin):
    """The keys and values of one layer. A read returns the part that is filled, without a copy."""

    is_sliding = False

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self._max_length = max_length
        self._length = 0
        self._keys = self._values = torch.empty(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, key_dim = key_states.shape
        # New tensors of the same dtype, on the same device.
        self._keys = key_states.new_zeros(rows, heads, self._max_length, key_dim)
        self._values = value_states.new_zeros(rows, heads, self._max_length, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, end = self._length, self._length + key_states.shape[2]
        self._keys[:, :, begin:end] = key_states
        self._values[:, :, begin:end] = value_states
        self._length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return self._max_length

    get_max_cache_shape = get_max_length
    """The name of the same method in older versions of transformers."""
