"""Which weights sampled which call, for engines that do not say so themselves.

No call starts while weights change; none is refused: it waits. Calls that outlast the bound run
across the change, and carry both versions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

ABANDONED_PAUSE_S = 0.05
"""Before a call is sent on from an engine that is gone: the next may not be there yet, and one that
asks again and again must leave room for what brings it."""


@dataclass(slots=True, eq=False)
class CallStamp:
    """Every version that may have sampled a token of one call, oldest first."""

    versions: list[int] = field(default_factory=list[int])
    is_doubtful: bool = False
    """A change of weights failed under it: nobody knows what it was sampled from."""


class GateAbandoned(Exception):
    """The engine behind this gate is gone; another one has its own."""


class WeightGate:
    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[CallStamp] = set()
        self._is_abandoned = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @asynccontextmanager
    async def call(self) -> AsyncGenerator[CallStamp]:
        """Around one call to the engine, from its first byte to its last. Raises GateAbandoned."""
        while not (self._open.is_set() or self._is_abandoned):
            await self._open.wait()
        if self._is_abandoned:
            await asyncio.sleep(ABANDONED_PAUSE_S)
            raise GateAbandoned
        stamp = CallStamp([self.version])
        self._running.add(stamp)
        self._idle.clear()
        try:
            yield stamp
        finally:
            self._running.discard(stamp)
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def change(
        self, version: int, bound_s: float, prepare: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncGenerator[None]:
        """Around the change of weights, which begins once no call runs or `bound_s` have passed,
        and `prepare` is done. Where that fails, the weights and the gate are as before. Where the
        change fails the gate stays shut: nobody may sample from weights nobody knows."""
        was_open = self._open.is_set()
        self._open.clear()
        try:
            await self._drained(bound_s)
            if prepare is not None:
                await prepare()
        except BaseException:  # no weight has moved yet
            if was_open:
                self._open.set()
            raise
        for stamp in self._running:
            stamp.versions.append(version)
        try:
            yield
        except BaseException:
            for stamp in self._running:
                stamp.is_doubtful = True
            raise
        self.version = version
        self._open.set()

    def abandon(self) -> None:
        """The engine is gone: who waits here is sent to the next."""
        self._is_abandoned = True
        self._open.set()

    async def _drained(self, bound_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                await self._idle.wait()
