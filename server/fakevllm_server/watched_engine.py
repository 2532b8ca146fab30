"""The engine's states, for those who wait for the next."""

from __future__ import annotations

import asyncio

from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.engine import Engine


class WatchedEngine(Engine):
    """An Engine whose moves can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._moved = asyncio.Event()

    def move(self, to: EngineStatus, now: float, detail: str | None = None) -> None:
        super().move(to, now, detail)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def next_move(self) -> None:
        await self._moved.wait()
