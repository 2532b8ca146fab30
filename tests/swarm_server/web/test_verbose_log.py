"""What is said to all is short, few and soon forgotten."""

from __future__ import annotations

from fakevllm_server.web.verbose_log import KEPT_S, MOST, VerboseEntry, VerboseLog


def test_entries_are_told_in_order_until_their_time_is_over() -> None:
    log = VerboseLog()
    log.push("a", "one", now=100.0)
    log.push("b", "two", now=110.0)
    assert log.entries(100.0 + KEPT_S) == [
        VerboseEntry(100.0, "a", "one"),
        VerboseEntry(110.0, "b", "two"),
    ]
    assert log.entries(100.1 + KEPT_S) == [VerboseEntry(110.0, "b", "two")]
    assert log.entries(110.1 + KEPT_S) == []


def test_of_too_many_the_newest_are_kept() -> None:
    log = VerboseLog()
    for number in range(MOST + 5):
        log.push("", str(number), now=0.0)
    assert [entry.message for entry in log.entries(0.0)] == [str(n) for n in range(5, MOST + 5)]
