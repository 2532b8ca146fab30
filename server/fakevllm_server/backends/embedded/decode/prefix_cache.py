"""A cache of the keys and values of prompts and their answers. Prompts with the same beginning
share the keys and values of this beginning. Examples are the requests of a group, the turns of a
session, and requests with the same system prompt. For a new prompt, only the tokens after the
common beginning are computed. The least recently used entries are evicted first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from fakevllm_server.backends.embedded.decode.kv_cache import CachedPrefix
from fakevllm_server.backends.embedded.decode.radix_tree import RadixTree

REUSE_STEP = 16
"""If only a part of a prompt is cached, the number of reused tokens is rounded down to a multiple
of this number. Prompts can be prefilled together only if the same number of tokens is reused in
each prompt. Without rounding, short prompts that have a few first tokens in common by chance would
be prefilled one by one. With a larger number, the next turn of a session computes more of the
tokens that are cached already."""


class PrefixCache:
    """A cache of at most `max_tokens` tokens in total. A request with a longer prompt is answered,
    but its prompt is not cached. Clear the cache when the weights change, because the cached values
    belong to the old weights.

    With `whole_prompts`, a cached prompt is reused only for an equal prompt. The keys and values of
    a prompt then do not depend on earlier prompts, not even in their rounding.
    """

    def __init__(self, max_tokens: int, whole_prompts: bool = False) -> None:
        self._tree = RadixTree[CachedPrefix](max_tokens, _split)
        self.whole_prompts = whole_prompts
        self.num_queried_tokens = 0
        """Number of tokens of all prompts that `get` has looked up."""
        self.num_reused_tokens = 0
        """Number of these tokens that were in the cache."""

    @property
    def num_tokens(self) -> int:
        return self._tree.num_tokens

    def num_cached(self, ids: Sequence[int]) -> int:
        """Return the number of first tokens of `ids` whose keys and values can be reused from the
        cache."""
        key = array("i", ids)
        return self._rounded(len(key), self._tree.num_matching(key, self._salt(key)))

    def get(self, ids: Sequence[int]) -> list[CachedPrefix]:
        """Return the keys and values of the first tokens of `ids`, in parts. Together the parts
        have `num_cached(ids)` tokens. The parts share memory with the cache, so the caller must
        copy them before the cache changes."""
        key = array("i", ids)
        parts = self._tree.match(key, self._salt(key))
        left = self._rounded(len(key), sum(length for _, length in parts))
        self.num_queried_tokens += len(key)
        self.num_reused_tokens += left
        taken: list[CachedPrefix] = []
        for prefix, length in parts:
            if left > 0:
                taken.append(prefix.part(0, min(length, left)))
            left -= length
        return taken

    def put(self, ids: Sequence[int], prefix: CachedPrefix) -> None:
        """Store the keys and values of a prompt in the cache."""
        key = array("i", ids)
        self._tree.insert(key, lambda begin, end: prefix.part(begin, end).copy(), self._salt(key))

    def put_answered(self, ids: Sequence[int], copy: Callable[[int, int], CachedPrefix]) -> None:
        """Store the keys and values of a prompt and its answer in the cache, for the next turn of
        the session. `copy(begin, end)` returns the keys and values of ids[begin:end]. It is called
        only for tokens that are not in the cache yet.

        In the mode `whole_prompts` (for reproducible runs), nothing is stored. The reason is that
        keys and values computed while sampling differ in their last bits from those computed in a
        prefill of the same tokens.
        """
        if not self.whole_prompts:
            self._tree.insert(array("i", ids), copy)

    def clear(self) -> None:
        self._tree.clear()

    def _salt(self, key: array[int]) -> bytes:
        return key.tobytes() if self.whole_prompts else b""

    def _rounded(self, num_tokens: int, num_matching: int) -> int:
        if num_matching == num_tokens:
            return num_matching
        return 0 if self.whole_prompts else num_matching // REUSE_STEP * REUSE_STEP


def _split(prefix: CachedPrefix, length: int) -> tuple[CachedPrefix, CachedPrefix]:
    # Without the copies, evicting one half would not free its memory.
    first, rest = prefix.part(0, length), prefix.part(length, prefix.num_tokens)
    return first.copy(), rest.copy()
