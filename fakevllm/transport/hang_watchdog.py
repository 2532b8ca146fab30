"""Watchdog for a call to the server. It ends the call if the server has disappeared without closing
the connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.transport.engine_client import unreachable
from fakevllm.transport.retry_policy import AbsenceTimer
from fakevllm_adapters.protocol.errors import unavailable
from fakevllm_adapters.protocol.outage_reasons import OutageReason

CHECK_EVERY_S = 0.5


class SentAnswer(Protocol):
    """Interface of an object that knows how much of the answer has been sent to the app."""

    @property
    def num_answer_chunks(self) -> int:
        """Number of chunks of answer data that have been sent to the app."""
        ...

    @property
    def has_answer_data(self) -> bool:
        """Whether any part of an answer or an error has been sent to the app."""
        ...


@dataclass(frozen=True, slots=True)
class NothingSent:
    """Implementation of SentAnswer for a response that is sent to the app only when the whole
    response has arrived. Until then, nothing has been sent."""

    num_answer_chunks: int = 0
    has_answer_data: bool = False


class HangWatchdog:
    """Context manager around one call to the server. It cancels the call and raises WireError (503)
    in either of two cases:

    * The server has disappeared: for `limit_s` seconds, it has not answered the proxy's status
      requests, and no new data of the answer has been sent to the app.
    * A fallback server can answer instead: a fallback server is configured (`has_fallback`), the
      engine has not been ready for `limit_s` seconds, and no answer data has been sent to the app.

    Without a fallback server, the watchdog does not end a call because the engine is not ready. The
    server itself waits for its engine, for longer than `limit_s`.
    """

    def __init__(
        self, link: SwarmLink, app: SentAnswer, limit_s: float, *, has_fallback: bool
    ) -> None:
        self._link = link
        self._app = app
        self._has_fallback = has_fallback
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        now_s = self._loop.time()
        self._engine_timer = AbsenceTimer(limit_s, now_s)
        # At least one check must follow, because a server may be back before the link knows it.
        self._server_timer = AbsenceTimer(max(limit_s, CHECK_EVERY_S), now_s)
        self._num_answer_chunks = app.num_answer_chunks
        self._is_engine_away = False
        self._timeout = asyncio.timeout(None)
        self._next_check: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._check()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._next_check is not None:
            self._next_check.cancel()
        try:
            await self._timeout.__aexit__(kind, error, at)
        except TimeoutError as timeout:  # raised by this timeout only, not by the block
            if self._is_engine_away:
                message = f"The engine did not become ready within {self._limit_s:g} s."
                raise unavailable(message, OutageReason.ENGINE_NOT_READY) from None
            raise unreachable(timeout) from timeout

    def _check(self) -> None:
        now_s = self._loop.time()
        if self._is_hopeless(now_s):
            self._timeout.reschedule(now_s)
        else:
            self._next_check = self._loop.call_later(CHECK_EVERY_S, self._check)

    def _is_hopeless(self, now_s: float) -> bool:
        """Update the timers of the watchdog, and return True if the call must be ended now."""
        has_progress = self._app.num_answer_chunks > self._num_answer_chunks
        self._num_answer_chunks = self._app.num_answer_chunks
        is_engine_away = self._engine_timer.has_expired(now_s, is_available=self._link.is_serving)
        self._is_engine_away = (
            is_engine_away and self._has_fallback and not self._app.has_answer_data
        )
        is_server_there = has_progress or not self._link.is_silent
        is_server_away = self._server_timer.has_expired(now_s, is_available=is_server_there)
        return is_server_away or self._is_engine_away
