"""Keeps a request going while the model is not there: holds it, tries again, and at last asks
another server, where one is named. `retry_policy.py` decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fakevllm.swarm.link import SwarmLink
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient, EngineResponse
from fakevllm.transport.fallback import Fallback, with_model
from fakevllm.transport.hang_watchdog import HangWatchdog
from fakevllm.transport.relay import relay
from fakevllm.transport.request import Request, SiblingPlan
from fakevllm.transport.retry_policy import RetrySchedule, hold_s
from fakevllm.transport.sibling_limit import SiblingLimit
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.reasons import OutageReason

log = logging.getLogger("fakevllm.transport.retry")

T = TypeVar("T")
Ask = Callable[[Request, Callable[[], bool]], Awaitable[T]]
"""Asks for one answer. Raises WireError for an outage, and for a 429 where the second argument
says that it is our doing."""

ALONE = SiblingPlan(1)


class RetryHandler:
    def __init__(
        self,
        upstream: EngineClient,
        link: SwarmLink | None = None,
        limit_s: float = 0.0,
        fallback: Fallback | None = None,
        served_name: Callable[[str], str | None] = lambda _: None,
        room: SiblingLimit | None = None,
    ) -> None:
        """`link` None: nobody knows more than the calls tell. `limit_s`: how long a request is
        held at most. `served_name`: what the model is called that an app may ask for by this name,
        None where that is its own; raises WireError (503) while that is not known. `room`: of the
        siblings that may keep the engine from a request."""
        self._upstream = upstream
        self._link = link
        self._limit_s = limit_s
        self._fallback = fallback
        self._served_name = served_name
        self.room = room or SiblingLimit()

    @property
    def num_waiting(self) -> int | None:
        """Requests in the engine's queue, None where that is not known."""
        return None if self._link is None else self._link.queue.num_waiting

    async def relay(
        self, request: Request, app: AppResponse, plan: SiblingPlan = ALONE
    ) -> tuple[EngineResponse, OutageReason | None]:
        """What the app got, and why it had to be of the fallback, if it was. Raises WireError
        while the app has got nothing of an answer."""

        async def ask(request: Request, is_by_us: Callable[[], bool]) -> EngineResponse:
            return await relay(self._upstream, plan.lead(request), app, is_by_us=is_by_us)

        try:
            return await self.held(request, app, ask), None
        except WireError as error:
            return await self.fall_back(request, app, error)

    async def held(self, request: Request, app: AppResponse, ask: Ask[T]) -> T:
        """Asks until there is an answer, as long as a request may be held. Raises the last
        WireError."""
        hold = RetrySchedule(hold_s(self._limit_s, request.apps_headers), time.monotonic())
        while True:
            is_by_us = self.room.looks()
            try:
                request = self._named(request)
                async with self._patience(hold.limit_s, app):
                    return await ask(request, is_by_us)
            except WireError as error:
                reason = error.reason
                if reason is None or app.is_told:
                    raise
                is_busy = reason is OutageReason.ENGINE_BUSY
                is_coming = is_by_us() if is_busy else self._is_coming
                pause_s = hold.pause(reason, time.monotonic(), is_coming=is_coming)
                if pause_s is None:
                    raise
            app.hold_back()
            await self._rest(reason, pause_s)

    async def fall_back(
        self, request: Request, app: AppResponse, error: WireError
    ) -> tuple[EngineResponse, OutageReason]:
        """The fallback's answer in the place of `error`, which is raised again where it has
        none."""
        if error.reason is None or self._fallback is None or app.is_told:
            raise error
        try:
            return await self._fallback.relay(request, app), error.reason
        except WireError as failed:
            if app.is_told:
                raise
            log.warning("the fallback does not answer either: %s", failed)
        raise error

    @property
    def _is_coming(self) -> bool:
        return self._link is None or self._link.is_coming

    async def _rest(self, reason: OutageReason, pause_s: float) -> None:
        """Until it is worth another try."""
        if reason is OutageReason.ENGINE_BUSY:
            self.room.refused()
            left = asyncio.Event()
            with contextlib.suppress(TimeoutError), self.room.awaited(left.set):
                # wait_for may lose a cancellation that comes with the event, up to Python 3.11
                async with asyncio.timeout(pause_s):
                    await left.wait()
        elif self._link is not None:
            await self._link.until_serving(pause_s)
        else:
            await asyncio.sleep(pause_s)

    def _named(self, request: Request) -> Request:
        """A name of the app's is replaced as soon as ours is known."""
        name = request.body.get("model") or request.model
        served = self._served_name(name) if isinstance(name, str) else None
        return request if served is None else with_model(request, served)

    def _patience(
        self, limit_s: float, app: AppResponse
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Around each time that it is asked."""
        if self._link is None:
            return contextlib.nullcontext()
        return HangWatchdog(self._link, app, limit_s, has_other=self._fallback is not None)


def why_failed(error: WireError) -> str:
    """As the ledger shows it."""
    is_gone = error.reason in (OutageReason.SERVER_UNREACHABLE, OutageReason.SERVER_BROKE_OFF)
    return "upstream_unreachable" if is_gone else f"upstream_{error.status}"
