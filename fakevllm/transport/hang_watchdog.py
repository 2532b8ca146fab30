"""How long a call is left with a server that keeps it: as long as the server is there."""

from __future__ import annotations

import asyncio
from types import TracebackType

from fakevllm.swarm.link import SwarmLink
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import unreachable
from fakevllm.transport.retry_policy import AbsenceTimer
from fakevllm_adapters.protocol.errors import unavailable
from fakevllm_adapters.protocol.reasons import OutageReason

LOOK_EVERY_S = 0.5


class HangWatchdog:
    """Around a call. Raises WireError (503) where it is waited for in vain: the server does not
    answer its link at all, nor tell the app anything, for as long as a request may be held. Where
    `has_other` could answer, an engine that is away is reason enough: the server itself waits
    for one longer than we do."""

    def __init__(
        self, link: SwarmLink, app: AppResponse, limit_s: float, *, has_other: bool
    ) -> None:
        self._link = link
        self._app = app
        self._has_other = has_other
        self._message = f"The engine did not become ready within {limit_s:g} s."
        self._clock = asyncio.get_running_loop()
        now_s = self._clock.time()
        self._engine = AbsenceTimer(limit_s, now_s)
        # At least one look: a server may have come back, and its link not have heard it yet.
        self._server = AbsenceTimer(max(limit_s, LOOK_EVERY_S), now_s)
        self._num_answer_chunks = app.num_answer_chunks
        self._is_engine_away = False
        self._limit = asyncio.timeout(None)
        self._next: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._look()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._next is not None:
            self._next.cancel()
        try:
            await self._limit.__aexit__(kind, error, at)
        except TimeoutError as late:  # only its own
            if self._is_engine_away:
                raise unavailable(self._message, OutageReason.ENGINE_NOT_READY) from None
            raise unreachable(late) from late

    def _look(self) -> None:
        now_s = self._clock.time()
        if self._is_in_vain(now_s):
            self._limit.reschedule(now_s)
        else:
            self._next = self._clock.call_later(LOOK_EVERY_S, self._look)

    def _is_in_vain(self, now_s: float) -> bool:
        has_answer_data, has_said = (
            self._app.has_answer_data,
            self._app.num_answer_chunks > self._num_answer_chunks,
        )
        self._num_answer_chunks = self._app.num_answer_chunks
        is_away = self._engine.is_too_long(now_s, is_there=self._link.is_serving)
        self._is_engine_away = is_away and self._has_other and not has_answer_data
        is_there = has_said or not self._link.is_silent
        return self._server.is_too_long(now_s, is_there=is_there) or self._is_engine_away
