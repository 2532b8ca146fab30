"""Limits on concurrent calls."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm_adapters.http.concurrency_limit import OpenCalls


def test_calls_beyond_a_limit_are_refused_with_429_and_retry_after() -> None:
    calls = OpenCalls(most=3, most_per_key=2)
    assert calls.enter("a") is None and calls.enter("a") is None
    own = calls.enter("a")
    assert own is not None and (own.status, own.retry_after_s) == (429, 2)
    assert "This key has 2 requests open" in own.message
    assert calls.enter(None) is None
    every = calls.enter("b")
    assert every is not None and every.status == 429 and "3 requests are open" in every.message
    calls.leave("a")
    assert calls.enter("b") is None


def test_keys_that_are_counted_under_one_name_share_its_limit() -> None:
    calls = OpenCalls(most_per_key=1, counted_as=lambda key: key[0])
    assert calls.enter("a1") is None and calls.enter("b1") is None
    assert calls.enter("a2") is not None
    calls.leave("a1")
    assert calls.enter("a2") is None


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b", None]))),
    st.integers(0, 4),
    st.integers(0, 3),
)
def test_the_counts_equal_the_numbers_of_open_calls(
    moves: list[tuple[bool, str | None]], most: int, per_key: int
) -> None:
    calls = OpenCalls(most, per_key)
    opened: list[str | None] = []
    for is_entering, key in moves:
        if is_entering:
            is_full = (0 < most <= len(opened)) or (0 < per_key <= opened.count(key))
            assert (calls.enter(key) is not None) is is_full
            opened += [] if is_full else [key]
        elif key in opened:
            opened.remove(key)
            calls.leave(key)
        assert calls.num == len(opened)
