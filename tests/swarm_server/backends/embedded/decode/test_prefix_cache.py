from __future__ import annotations

import torch

from fakevllm_server.backends.embedded.decode.kv_cache import CachedPrefix
from fakevllm_server.backends.embedded.decode.prefix_cache import PrefixCache


def prefix(num_tokens: int) -> CachedPrefix:
    return CachedPrefix(torch.zeros(1, 1, num_tokens, 1), torch.zeros(1, 1, num_tokens, 1))


def test_the_least_recently_used_prefix_is_evicted_above_the_token_limit() -> None:
    cache = PrefixCache(max_tokens=10)
    cache.put(b"a", prefix(4))
    cache.put(b"b", prefix(4))
    cache.get(b"a")

    cache.put(b"c", prefix(5))

    assert b"b" not in cache and b"a" in cache and b"c" in cache
    assert cache.num_tokens == 9


def test_a_prefix_larger_than_the_cache_evicts_nobody() -> None:
    cache = PrefixCache(max_tokens=10)
    cache.put(b"a", prefix(10))

    cache.put(b"huge", prefix(11))

    assert b"a" in cache and b"huge" not in cache


def test_a_cleared_prefix_cache_is_empty() -> None:
    cache = PrefixCache(max_tokens=10)
    cache.put(b"a", prefix(4))

    cache.clear()

    assert b"a" not in cache and cache.num_tokens == 0
