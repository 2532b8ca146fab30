"""Which weights sampled which call, for engines that do not say so themselves.

No call starts while weights change; none is refused: it waits. Calls that outlast the bound run
across the change, and carry both versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class CallStamp:
    """Every version that may have sampled a token of one call, oldest first."""

    versions: list[int] = field(default_factory=list[int])


class WeightGate:
    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[CallStamp] = set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @asynccontextmanager
    async def call(self) -> AsyncGenerator[CallStamp]:
        """Around one call to the engine, from its first byte to its last."""
        while not self._open.is_set():
            await self._open.wait()
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
    async def change(self, version: int, bound_s: float) -> AsyncGenerator[None]:
        """Around the change of weights, which begins once no call runs or `bound_s` have passed.
        Where it fails the gate stays shut: nobody may sample from weights nobody knows."""
        self._open.clear()
        try:
            async with asyncio.timeout(bound_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        yield
        self.version = version
        for stamp in self._running:
            stamp.versions.append(version)
        self._open.set()
