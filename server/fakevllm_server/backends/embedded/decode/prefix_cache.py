"""A cache of the keys and values of recent prompts. A prompt that several requests share is
prefilled only once. The least recently used prompts are evicted first."""

from __future__ import annotations

from collections import OrderedDict

from fakevllm_server.backends.embedded.decode.kv_cache import CachedPrefix


class PrefixCache:
    """A cache of the keys and values of prompts, with at most `max_tokens` tokens in total. Clear
    it when the weights change, because the cached values belong to the old weights."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.num_hits = 0
        self._entries: OrderedDict[bytes, CachedPrefix] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> CachedPrefix:
        self._entries.move_to_end(key)
        self.num_hits += 1
        return self._entries[key]

    def put(self, key: bytes, prefix: CachedPrefix) -> None:
        if prefix.num_tokens > self.max_tokens or key in self._entries:
            return
        self._entries[key] = prefix
        self.num_tokens += prefix.num_tokens
        while self.num_tokens > self.max_tokens:
            _, oldest = self._entries.popitem(last=False)
            self.num_tokens -= oldest.num_tokens

    def clear(self) -> None:
        self._entries.clear()
        self.num_tokens = 0
