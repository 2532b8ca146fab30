"""Detect a vLLM that hangs although its process is alive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from fakevllm_server.backends.vllm.control_client import ControlClient
from fakevllm_server.backends.vllm.response import VllmResponse

HEALTH_BOUND_S = 60.0
"""Maximum seconds without a response to /health. The API process responds to /health even if the
engine is busy."""
TOKEN_BOUND_S = 300.0
"""Maximum seconds without a token while calls wait. The limit is longer than any engine step, even
the first step, which compiles kernels."""
POLL_INTERVAL_S = 10.0
PROGRESS_COUNTERS = b"vllm:generation_tokens_total", b"vllm:iteration_tokens_total_count"
"""Prometheus counters of vLLM that increase with every engine step."""
CANARY = {"prompt": "a", "max_tokens": 1}
"""The request for one token that tests whether the engine samples."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The observed state of vLLM at one time."""

    at: float
    """Seconds on a monotonic clock."""
    is_healthy: bool
    num_running: int
    """Number of calls that wait for tokens."""
    has_progressed: bool
    """Whether vLLM has sampled since the previous observation. This is true if a progress counter
    has increased, or if a test request for one token has succeeded."""
    is_paused: bool
    """Whether vLLM is paused because its weights are being replaced. The replacement has timeouts
    of its own."""


class Watchdog:
    """Decides from observations of a vLLM whether the vLLM hangs. Add the observations in the order
    of time."""

    def __init__(self, now: float) -> None:
        self._last_healthy_at = now
        self._last_progress_at = now

    def observe(self, state: Observation) -> str | None:
        """Add an observation of vLLM's state. If vLLM hangs, return a description of the hang. The
        description has no subject, such as "has not responded to /health for 61 s". Return None if
        vLLM does not hang."""
        if state.is_healthy:
            self._last_healthy_at = state.at
        if state.has_progressed or state.is_paused or not state.num_running:
            self._last_progress_at = state.at
        unhealthy_s, idle_s = state.at - self._last_healthy_at, state.at - self._last_progress_at
        if unhealthy_s > HEALTH_BOUND_S:
            return f"has not responded to /health for {unhealthy_s:.0f} s"
        if idle_s > TOKEN_BOUND_S:
            return f"has sampled nothing for {idle_s:.0f} s, with {state.num_running} calls waiting"
        return None


async def wait_until_hung(
    client: ControlClient, num_running: Callable[[], int], is_paused: Callable[[], bool]
) -> str:
    """Observe vLLM every `POLL_INTERVAL_S` seconds until vLLM hangs. Return a description of the
    hang. The description has no subject, such as "has not responded to /health for 61 s"."""
    watchdog, progress = Watchdog(time.monotonic()), _ProgressProbe(client)
    try:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            running = num_running()
            is_healthy = await client.is_healthy()
            has_progressed = bool(running and is_healthy) and await progress.has_progressed()
            now = time.monotonic()
            state = Observation(now, is_healthy, running, has_progressed, is_paused())
            if (problem := watchdog.observe(state)) is not None:
                return problem
    finally:
        await progress.close()


class _ProgressProbe:
    """Tests whether vLLM's engine samples tokens.

    The test compares vLLM's progress counters with their previous values. If no counter has
    increased, or if there are no counters, the test requests a completion of one token.
    """

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._count: float | None = None
        self._canary: asyncio.Task[VllmResponse] | None = None

    async def has_progressed(self) -> bool:
        metrics = await self._client.get("/metrics")
        previous, self._count = self._count, sum_progress_counters(metrics.body)
        if self._count is not None and self._count != previous:
            return True
        if self._canary is None:
            self._canary = asyncio.create_task(
                self._client.post("/v1/completions", CANARY, TOKEN_BOUND_S)
            )
        if not self._canary.done():
            return False
        response, self._canary = self._canary.result(), None
        return response.is_ok

    async def close(self) -> None:
        if self._canary is not None:
            self._canary.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._canary


def sum_progress_counters(metrics: bytes) -> float | None:
    r"""Return the sum of all PROGRESS_COUNTERS on vLLM's /metrics page. Return None if the page has
    no such counter.

    >>> sum_progress_counters(b'vllm:generation_tokens_total{engine="0"} 12.0\nother 3')
    12.0
    """
    values = [
        float(line.rpartition(b" ")[2])
        for line in metrics.split(b"\n")
        if line.startswith(PROGRESS_COUNTERS)
    ]
    return sum(values) if values else None
