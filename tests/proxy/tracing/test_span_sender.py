"""Tests of the thread that sends spans, with a collector that is slow, away or gone for good."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from fakevllm.tracing.request_trace import FinishedTrace
from fakevllm.tracing.span_plan import RequestSpans, SpanPlanner, Upstream
from fakevllm.tracing.span_sender import SpanSender
from tests.e2e.processes import wait_until
from tests.proxy.tracing.finished_traces import record, trace

URL = "http://collector:4318/v1/traces"
WAIT_S = 10.0
planner = SpanPlanner(Upstream("h", 1), None, with_content=False)


class Collected:
    """An exporter that keeps the spans, and waits for the test in each export."""

    def __init__(self, cause: str | None = None, *, is_open: bool = True) -> None:
        self.cause = cause
        self.batches: list[list[RequestSpans]] = []
        self.gate = threading.Event()
        self.is_closed = False
        if is_open:
            self.gate.set()

    def export(self, batch: Sequence[RequestSpans]) -> str | None:
        assert self.gate.wait(WAIT_S)
        self.batches.append(list(batch))
        return self.cause

    def close(self) -> None:
        self.is_closed = True


def opened(
    exporter: Collected,
    plan: Callable[[FinishedTrace], RequestSpans] = planner.spans,
    max_queued: int = 100,
) -> SpanSender:
    return SpanSender(plan, exporter, URL, max_queued=max_queued)


def test_a_close_sends_what_is_queued_and_closes_the_exporter() -> None:
    exporter = Collected()
    sender = opened(exporter)
    for _ in range(10):
        sender.put(trace())
    sender.close(WAIT_S)
    assert sum(len(batch) for batch in exporter.batches) == 10
    assert exporter.is_closed and sender.counts == {"sent": 10, "failed": 0, "dropped": 0}


def test_requests_that_end_together_are_sent_together() -> None:
    exporter = Collected()
    sender = opened(exporter)
    for _ in range(5):
        sender.put(trace())
    sender.close(WAIT_S)
    assert len(exporter.batches) < 5


def test_a_full_queue_drops_and_counts_and_never_waits(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Collected(is_open=False)
    sender = opened(exporter, max_queued=2)
    started = time.monotonic()
    for _ in range(500):
        sender.put(trace())
    assert time.monotonic() - started < 1.0
    exporter.gate.set()
    sender.close(WAIT_S)
    counts = sender.counts
    assert counts["dropped"] > 0 and counts["sent"] + counts["dropped"] == 500
    lines = [one for one in caplog.messages if "the collector is too slow" in one]
    assert len(lines) == 1


def test_a_stop_waits_no_longer_than_its_limit_for_a_collector_that_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter = Collected(is_open=False)
    sender = opened(exporter)
    sender.put(trace())
    sender.close(0.2)
    assert f"could not be sent to {URL} before the stop; the spans of 1 request are lost" in (
        caplog.text
    )
    exporter.gate.set()


def test_one_line_says_that_the_collector_is_away_and_one_that_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    exporter = Collected("Connection refused")
    sender = opened(exporter)
    for num in range(1, 4):
        sender.put(trace())
        wait_until(lambda num=num: len(exporter.batches) == num, WAIT_S)
    exporter.cause = None
    sender.put(trace())
    sender.close(WAIT_S)
    assert sender.counts == {"sent": 1, "failed": 3, "dropped": 0}
    assert caplog.messages == [
        f"OpenTelemetry spans cannot be sent to {URL} (Connection refused); apps are served as "
        "usual, and the spans of 1 request are lost so far",
        f"OpenTelemetry spans are sent to {URL} again",
    ]


def test_a_request_whose_spans_cannot_be_made_does_not_stop_the_others() -> None:
    def plan(ended: FinishedTrace) -> RequestSpans:
        if ended.record.group_id == "bad":
            raise ValueError("a bug")
        return planner.spans(ended)

    exporter = Collected()
    sender = opened(exporter, plan)
    sender.put(trace(record=record(group_id="bad")))
    sender.put(trace())
    sender.close(WAIT_S)
    assert sender.counts == {"sent": 1, "failed": 1, "dropped": 0}
