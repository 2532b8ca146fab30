from __future__ import annotations

import pytest
import torch

from fakevllm_server.backends.embedded.decode.kv_cache import CachedPrefix
from fakevllm_server.backends.embedded.decode.prefix_cache import REUSE_STEP, PrefixCache


def put(cache: PrefixCache, ids: list[int]) -> None:
    """Keep a prompt whose keys are its ids, and whose values are the ids with another sign."""
    marks = torch.tensor(ids, dtype=torch.float32)[None, None, :, None]
    cache.put(ids, CachedPrefix(marks, -marks))


def kept(cache: PrefixCache, ids: list[int]) -> list[int]:
    """Return the ids that the cache has of the beginning of `ids`, read from keys and values."""
    parts = cache.get(ids)
    keys = [int(key) for part in parts for key in part.keys.flatten()]
    assert keys == [-int(value) for part in parts for value in part.values.flatten()]
    assert len(keys) == cache.num_cached(ids)
    return keys


def test_a_prompt_that_begins_like_a_cached_one_reuses_whole_steps_of_it() -> None:
    cache = PrefixCache(max_tokens=1000)
    first = list(range(3 * REUSE_STEP))
    put(cache, first)

    assert kept(cache, first) == first
    assert kept(cache, [*first, 7, 7]) == first
    assert kept(cache, [*first[:-1], 999, 7]) == first[: 2 * REUSE_STEP]
    assert kept(cache, first[: REUSE_STEP + 5]) == first[: REUSE_STEP + 5], "the whole prompt"
    assert kept(cache, [*first[: REUSE_STEP - 1], 999]) == []


def test_turns_of_a_session_are_kept_once() -> None:
    cache = PrefixCache(max_tokens=1000)
    turns = [list(range(length)) for length in (40, 100, 160)]
    for turn in turns:
        put(cache, turn)

    assert cache.num_tokens == 160
    assert [kept(cache, turn) for turn in turns] == turns


def test_a_part_that_was_split_does_not_hold_the_memory_of_the_other_part() -> None:
    cache = PrefixCache(max_tokens=1000)
    put(cache, list(range(64)))
    put(cache, [*range(40), *range(500, 510)])

    for part in cache.get(list(range(64))):
        storage = part.keys.untyped_storage().nbytes()
        assert storage == part.num_tokens * 4, "a clone of its own"


def test_a_prompt_above_the_bound_evicts_nothing_and_is_not_kept() -> None:
    cache = PrefixCache(max_tokens=10)
    put(cache, list(range(10)))

    put(cache, list(range(100, 111)))

    assert kept(cache, list(range(10))) == list(range(10))
    assert cache.num_cached(list(range(100, 111))) == 0


def test_a_bound_of_zero_keeps_nothing() -> None:
    cache = PrefixCache(max_tokens=0)
    put(cache, [1, 2, 3])

    assert cache.num_tokens == 0 and cache.num_cached([1, 2, 3]) == 0


def test_whole_prompts_are_reused_only_for_equal_prompts() -> None:
    cache = PrefixCache(max_tokens=1000, whole_prompts=True)
    long = list(range(100))
    put(cache, long)

    assert kept(cache, long) == long
    assert kept(cache, long[:64]) == [] and kept(cache, [*long, 1]) == []


def test_only_the_part_that_is_not_cached_is_copied_of_an_answer() -> None:
    cache = PrefixCache(max_tokens=1000)
    put(cache, list(range(40)))
    copied: list[tuple[int, int]] = []

    def copy(begin: int, end: int) -> CachedPrefix:
        copied.append((begin, end))
        marks = torch.arange(begin, end, dtype=torch.float32)[None, None, :, None]
        return CachedPrefix(marks, -marks)

    cache.put_answered(list(range(70)), copy)
    cache.put_answered(list(range(70)), copy)

    assert copied == [(40, 70)]
    assert kept(cache, list(range(70))) == list(range(70))


def test_with_whole_prompts_no_answer_is_kept() -> None:
    cache = PrefixCache(max_tokens=1000, whole_prompts=True)

    cache.put_answered([1, 2, 3], lambda begin, end: pytest.fail("nothing is copied"))

    assert cache.num_tokens == 0


def test_a_cleared_prefix_cache_is_empty() -> None:
    cache = PrefixCache(max_tokens=10)
    put(cache, [1, 2, 3])

    cache.clear()

    assert cache.num_tokens == 0 and cache.num_cached([1, 2, 3]) == 0
