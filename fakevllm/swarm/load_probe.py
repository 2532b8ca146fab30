"""How many requests wait in the engine's queue, by what the engine tells Prometheus."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

PROBE_EVERY_S = 1.0
"""A real engine's page takes it milliseconds."""
TIMEOUT_S = 2.0
log = logging.getLogger("fakevllm.link")
_WAITING = "vllm:num_requests_waiting"


class LoadProbe:
    def __init__(
        self,
        is_wanted: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_wanted`: whether anybody goes by it now. An engine that begins to answer is asked
        once all the same, so that the first who does knows it."""
        self._is_wanted = is_wanted
        self._clock = clock
        self._next_at = clock()
        self._has_probed = False
        """Since the engine began to answer."""
        self.num_waiting: int | None = None
        """As last heard; None where the engine does not tell."""

    async def follow(self, http: aiohttp.ClientSession, *, is_serving: bool) -> None:
        """To be called often; asks when it is time. Raises nothing of the server's."""
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
        async with http.get("/metrics", timeout=timeout) as answer:
            return parse_queue_length(await answer.text()) if answer.status == 200 else None
    except Exception as error:  # isolates: a garbled page is no reason to lose the server
        log.debug("no queue is known: %s", error)
        return None


def parse_queue_length(page: str) -> int | None:
    """Of all the engines on a page; None where it tells of none. Raises some
    exception where it is garbled.

    >>> parse_queue_length('vllm:num_requests_waiting{engine="0"} 2.0')
    2
    """
    lines = [line for line in page.splitlines() if line.startswith(_WAITING)]
    found = [
        sample.value
        for family in text_string_to_metric_families("\n".join(lines))
        for sample in family.samples
        if sample.name == _WAITING
    ]
    return max(0, int(sum(found))) if found else None
