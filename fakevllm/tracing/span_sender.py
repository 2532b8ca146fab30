"""The thread that makes the spans of ended requests and sends them to the collector.

The queue in front of the thread has a bound. If the collector is slow or away, the queue fills, and
further requests have no spans. They are counted. Requests of apps never wait for this thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fakevllm.runtime.plurals import counted
from fakevllm.tracing.request_trace import FinishedTrace
from fakevllm.tracing.span_plan import RequestSpans
from fakevllm_runtime.log_throttle import LogThrottle

log = logging.getLogger("fakevllm.tracing")

MAX_QUEUED = 1024
"""Maximum number of ended requests that wait for the thread."""
MAX_QUEUED_WITH_CONTENT = 64
"""The same if spans have content. Each request then holds its prompt and all answers in memory."""
MAX_BATCH = 64
"""Maximum number of requests whose spans are sent at once. With eight siblings, a request has about
ten spans, and OpenTelemetry's own limit is 512 spans."""
MAX_BATCH_CHARS = 2**22
"""Number of characters of content after which a batch is sent. Collectors accept 20 MiB."""
BATCH_DELAY_S = 1.0
"""Seconds that a batch waits for further requests."""
CLOSE_TIMEOUT_S = 3.0
"""Seconds for which a stopping proxy waits for the last batches."""
WARN_EVERY_S = 60.0
"""Minimum number of seconds between two log lines about a collector that is away."""


class Exporter(Protocol):
    """The connection to the collector. Only the sender's thread uses it."""

    def export(self, batch: Sequence[RequestSpans]) -> str | None:
        """Send the spans. Return the cause of a failure, or None."""
        ...

    def close(self) -> None: ...


class SpanSender:
    """The owner of the thread that sends spans. Call `close` last."""

    def __init__(
        self,
        plan: Callable[[FinishedTrace], RequestSpans],
        exporter: Exporter,
        url: str,
        *,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        """Start the thread. `plan` makes the spans of a request. `url` is the collector's address,
        for log lines."""
        self._plan = plan
        self._exporter = exporter
        self._url = url
        self._queue: queue.Queue[FinishedTrace | None] = queue.Queue(max_queued)
        self._is_closing = False
        self._is_failing = False
        self._throttle = LogThrottle(WARN_EVERY_S)
        self._num_queued = self._num_sent = self._num_failed = self._num_dropped = 0
        # A daemon, because a collector that hangs must not delay the end of the process.
        self._thread = threading.Thread(target=self._run, name="fakevllm-spans", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[str, int]:
        """Number of requests by what became of their spans."""
        return {"sent": self._num_sent, "failed": self._num_failed, "dropped": self._num_dropped}

    def put(self, trace: FinishedTrace) -> None:
        """Queue the spans of a request that has ended. Drop them if the queue is full."""
        try:
            self._queue.put_nowait(trace)
            self._num_queued += 1
        except queue.Full:
            self._num_dropped += 1
            self._warn("the collector is too slow")

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what is queued, for at most `timeout_s` seconds. This method blocks."""
        self._is_closing = True
        with contextlib.suppress(queue.Full):  # a busy thread sees `_is_closing` itself
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning(
                "OpenTelemetry spans could not be sent to %s before the stop; the spans of %s are "
                "lost",
                self._url,
                counted(self._num_queued - self._num_sent - self._num_failed, "request"),
            )

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            if batch:
                self._send(batch)
            if self._is_closing and self._queue.empty():
                return self._exporter.close()

    def _next_batch(self) -> list[RequestSpans]:
        """Wait for the next request that has ended. Return its spans, and those of the requests
        that end shortly after it."""
        batch: list[RequestSpans] = []
        size, trace = 0, self._queue.get()
        deadline = time.monotonic() + BATCH_DELAY_S
        while trace is not None:
            spans = self._planned(trace)
            if spans is not None:
                batch.append(spans)
                size += _num_chars(spans)
            wait_s = 0.0 if self._is_closing else deadline - time.monotonic()
            if len(batch) >= MAX_BATCH or size >= MAX_BATCH_CHARS:
                break
            try:
                trace = self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
        return batch

    def _planned(self, trace: FinishedTrace) -> RequestSpans | None:
        try:
            return self._plan(trace)
        except Exception:  # isolates: the spans of other requests are sent
            self._num_failed += 1
            log.exception(
                "spans of a request cannot be made", extra={"group": trace.record.group_id}
            )
            return None

    def _send(self, batch: list[RequestSpans]) -> None:
        try:
            cause = self._exporter.export(batch)
        except Exception as error:  # isolates: spans are never worth a failure
            cause = f"{type(error).__name__}: {error}"
        if cause is None:
            self._num_sent += len(batch)
            if self._is_failing:
                log.info("OpenTelemetry spans are sent to %s again", self._url)
            self._is_failing = False
        else:
            self._num_failed += len(batch)
            self._is_failing = True
            self._warn(cause)

    def _warn(self, cause: str) -> None:
        if self._throttle.due("failure", time.monotonic()) is not None:
            log.warning(
                "OpenTelemetry spans cannot be sent to %s (%s); apps are served as usual, and the "
                "spans of %s are lost so far",
                self._url,
                cause,
                counted(self._num_failed + self._num_dropped, "request"),
            )


def _num_chars(spans: RequestSpans) -> int:
    every = (spans.request, *spans.children)
    texts = (value for span in every for value in span.attributes.values())
    return sum(len(text) for text in texts if isinstance(text, str))
