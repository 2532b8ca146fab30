"""Repeated log lines are rate-limited by kind."""

from __future__ import annotations

import logging

import pytest

from fakevllm_runtime.log_throttle import MAX_KINDS, DueLine, LogThrottle, ThrottledLog

FIRST = DueLine(is_first=True, num_suppressed=0)


def test_the_first_line_of_a_kind_is_due_at_once_and_later_lines_count_the_suppressed() -> None:
    throttle = LogThrottle(5.0)
    lines = [throttle.due("a", now) for now in (0.0, 1.0, 2.0, 5.0, 6.0, 10.0, 20.0)]
    later = [DueLine(is_first=False, num_suppressed=number) for number in (2, 1, 0)]
    assert lines == [FIRST, None, None, later[0], None, later[1], later[2]]
    assert throttle.due("b", 20.0) == FIRST


def test_beyond_the_maximum_number_of_kinds_the_kind_with_the_oldest_line_is_forgotten() -> None:
    throttle = LogThrottle(5.0)
    for kind in range(MAX_KINDS):
        assert throttle.due(kind, 0.0) == FIRST
    assert throttle.due(0, 6.0) == DueLine(is_first=False, num_suppressed=0)
    assert throttle.due("one more", 6.0) == FIRST
    assert throttle.due(0, 7.0) is None, "its line was due a second ago"
    assert throttle.due(2, 7.0) == DueLine(is_first=False, num_suppressed=0)
    assert throttle.due(1, 7.0) == FIRST


def test_a_throttled_log_passes_equal_messages_once_per_interval_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    logger = logging.getLogger("throttled")
    logger.addFilter(ThrottledLog(60.0, lambda: now))
    for now in (0.0, 1.0, 2.0, 61.0):
        logger.warning("Invalid request from %s", now)
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == [
        "Invalid request from 0.0",
        "Invalid request from 61.0 (2 more in between)",
        "something else",
    ]


def test_a_throttled_log_passes_every_traceback(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("throttled tracebacks")
    logger.addFilter(ThrottledLog(60.0))
    for error in (ValueError("one"), KeyError("two")):
        logger.error("Exception in ASGI application", exc_info=error)
    assert len(caplog.records) == 2
