"""The messages that clients push for each other."""

from __future__ import annotations

from fakevllm_server.web.verbose_log import MAX_ENTRIES, RETENTION_S, VerboseEntry, VerboseLog


def test_entries_are_returned_in_order_until_they_expire() -> None:
    log = VerboseLog()
    log.push("a", "one", now=100.0, unix_now=5000.0)
    log.push("b", "two", now=110.0, unix_now=1400.0)  # the clock was set back
    assert log.entries(100.0 + RETENTION_S) == [
        VerboseEntry(5000.0, "a", "one"),
        VerboseEntry(1400.0, "b", "two"),
    ]
    assert log.entries(100.1 + RETENTION_S) == [VerboseEntry(1400.0, "b", "two")]
    assert log.entries(110.1 + RETENTION_S) == []


def test_above_the_limit_the_newest_entries_are_kept() -> None:
    log = VerboseLog()
    for number in range(MAX_ENTRIES + 5):
        log.push("", str(number), now=0.0, unix_now=0.0)
    assert [entry.message for entry in log.entries(0.0)] == [
        str(n) for n in range(5, MAX_ENTRIES + 5)
    ]
