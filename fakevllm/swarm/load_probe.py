"""Read from the engine's Prometheus metrics how many requests wait in the engine's queue."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

PROBE_EVERY_S = 1.0
"""Seconds between two probes. For each probe, the engine works for some milliseconds, in which it
writes its metrics as text."""
TIMEOUT_S = 2.0
"""Timeout of a probe, in seconds."""
log = logging.getLogger("fakevllm.link")
_WAITING = "vllm:num_requests_waiting"


class LoadProbe:
    """Periodic probe of the engine's queue. The object stores the latest known queue length."""

    def __init__(
        self,
        is_wanted: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a probe. `is_wanted` is a function that returns True while the queue length is
        needed. Each time the engine becomes ready, one probe is made even if `is_wanted` returns
        False. Therefore the queue length is known when the first request arrives."""
        self._is_wanted = is_wanted
        self._clock = clock
        self._next_at = clock()
        self._has_probed = False
        """Whether the engine has been probed since the engine became ready."""
        self.num_waiting: int | None = None
        """Number of requests that wait in the engine's queue; None if it is unknown."""

    async def follow(self, http: aiohttp.ClientSession, *, is_serving: bool) -> None:
        """Read the queue length from the engine if the next probe is due. Call this method often,
        because this object has no timer. `is_serving` is True if the engine is ready.

        If the probe fails, no error is raised, and `num_waiting` becomes None. While the queue
        length is not needed, no further probe is made. During this time, `num_waiting` is 0, or
        None if the last probe failed.
        """
        if not is_serving:
            self.num_waiting, self._has_probed = None, False
        elif self._has_probed and not self._is_wanted():
            if self.num_waiting is not None:
                self.num_waiting, self._next_at = 0, self._clock()
        elif self._clock() >= self._next_at:
            self._has_probed, self._next_at = True, self._clock() + PROBE_EVERY_S
            self.num_waiting = await _fetch_queue_length(http)


async def _fetch_queue_length(http: aiohttp.ClientSession) -> int | None:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with http.get("/metrics", timeout=timeout) as response:
            if response.status != 200:
                return None
            return parse_queue_length(await response.text())
    except Exception as error:  # isolates: malformed metrics must not end the link to the server
        log.debug("the length of the engine's queue is unknown: %s", error)
        return None


def parse_queue_length(metrics: str) -> int | None:
    """Return the number of requests that wait in the queues of all engines together. `metrics` is a
    text of Prometheus metrics. Return None if the text does not contain the queue length of any
    engine. Malformed text may raise an exception of any type.

    >>> parse_queue_length('vllm:num_requests_waiting{engine="0"} 2.0')
    2
    """
    lines = [line for line in metrics.splitlines() if line.startswith(_WAITING)]
    values = [
        sample.value
        for family in text_string_to_metric_families("\n".join(lines))
        for sample in family.samples
        if sample.name == _WAITING
    ]
    return max(0, int(sum(values))) if values else None
