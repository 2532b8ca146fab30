"""When a vLLM that has not ended is hung all the same."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from fakevllm_server.backends.vllm.answer import Answer
from fakevllm_server.backends.vllm.control import Control

HEALTH_BOUND_S = 60.0
"""The API process answers by itself, whatever the engine does."""
TOKEN_BOUND_S = 300.0
"""Longer than any step, the first one's compilation included."""


LOOK_EVERY_S = 10.0
PROGRESS = b"vllm:generation_tokens_total", b"vllm:iteration_tokens_total_count"
"""Counters that rise with every step of the engine's."""
CANARY = {"prompt": "a", "max_tokens": 1}


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of vLLM at one time."""

    at: float
    """Seconds on a clock that never goes back."""
    is_healthy: bool
    num_running: int
    """Calls that wait for tokens."""
    has_moved: bool
    """It has sampled since the look before: its counter rose, or a completion came back."""
    is_paused: bool
    """Its weights are being changed, which has bounds of its own."""


class Watchdog:
    """Of one vLLM; told what is seen, in order."""

    def __init__(self, now: float) -> None:
        self._last_health = now
        self._last_token = now

    def verdict(self, look: Look) -> str | None:
        """How it hangs, or None."""
        if look.is_healthy:
            self._last_health = look.at
        if look.has_moved or look.is_paused or not look.num_running:
            self._last_token = look.at
        silent_s, idle_s = look.at - self._last_health, look.at - self._last_token
        if silent_s > HEALTH_BOUND_S:
            return f"has not answered /health for {silent_s:.0f} s"
        if idle_s > TOKEN_BOUND_S:
            return f"has sampled nothing for {idle_s:.0f} s, with {look.num_running} calls waiting"
        return None


async def until_hung(
    control: Control, num_running: Callable[[], int], is_paused: Callable[[], bool]
) -> str:
    """Looks now and then; returns how it hangs once it does."""
    dog, eye = Watchdog(time.monotonic()), _Eye(control)
    try:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            running = num_running()
            is_healthy = await control.is_healthy()
            has_moved = bool(running and is_healthy) and await eye.has_moved()
            look = Look(time.monotonic(), is_healthy, running, has_moved, is_paused())
            if (how := dog.verdict(look)) is not None:
                return how
    finally:
        await eye.close()


class _Eye:
    """Whether the engine samples: by its counters, and where they stand still or there are none,
    by a completion of one token."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._counted: float | None = None
        self._canary: asyncio.Task[Answer] | None = None

    async def has_moved(self) -> bool:
        metrics = await self._control.get("/metrics")
        before, self._counted = self._counted, progress_in(metrics.body)
        if self._counted is not None and self._counted != before:
            return True
        if self._canary is None:
            self._canary = asyncio.create_task(
                self._control.post("/v1/completions", CANARY, TOKEN_BOUND_S)
            )
        if not self._canary.done():
            return False
        answer, self._canary = self._canary.result(), None
        return answer.is_ok

    async def close(self) -> None:
        if self._canary is not None:
            self._canary.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._canary


def progress_in(metrics: bytes) -> float | None:
    r"""The sum of the counters, None where there are none.

    >>> progress_in(b'vllm:generation_tokens_total{engine="0"} 12.0\nother 3')
    12.0
    """
    counted = [
        float(line.rpartition(b" ")[2])
        for line in metrics.split(b"\n")
        if line.startswith(PROGRESS)
    ]
    return sum(counted) if counted else None
