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
from fakevllm.transport.retry_policy import RetrySchedule, max_hold_s
from fakevllm.transport.sibling_limit import SiblingLimit
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.reasons import OutageReason

log = logging.getLogger("fakevllm.transport.retry")

T = TypeVar("T")
Attempt = Callable[[Request, Callable[[], bool]], Awaitable[T]]
"""Asks for one answer. Raises WireError for an outage, and for a 429 where the second argument
says that it is our doing."""

LEAD_ONLY = SiblingPlan(1)


class RetryHandler:
    def __init__(
        self,
        upstream: EngineClient,
        link: SwarmLink | None = None,
        limit_s: float = 0.0,
        fallback: Fallback | None = None,
        served_name: Callable[[str], str | None] = lambda _: None,
        sibling_limit: SiblingLimit | None = None,
    ) -> None:
        """`link`: None if the state of the server is known only from the calls themselves.
        `limit_s`: maximum seconds for which a request is held. `served_name`: maps an alias that an
        app requested to the served model's name, and any other name to None; it raises WireError
        (503) if the served model is not known yet. `sibling_limit`: the siblings that compete with
        this handler's requests for the engine."""
        self._upstream = upstream
        self._link = link
        self._limit_s = limit_s
        self._fallback = fallback
        self._served_name = served_name
        self.sibling_limit = sibling_limit or SiblingLimit()

    @property
    def num_waiting(self) -> int | None:
        """Requests in the engine's queue, None where that is not known."""
        return None if self._link is None else self._link.load_probe.num_waiting

    async def relay(
        self, request: Request, app: AppResponse, plan: SiblingPlan = LEAD_ONLY
    ) -> tuple[EngineResponse, OutageReason | None]:
        """What the app got, and why it had to be of the fallback, if it was. Raises WireError
        while the app has got nothing of an answer."""

        async def ask(
            request: Request, is_caused_by_siblings: Callable[[], bool]
        ) -> EngineResponse:
            return await relay(
                self._upstream,
                plan.lead_request(request),
                app,
                is_caused_by_siblings=is_caused_by_siblings,
            )

        try:
            return await self.retry_until_answered(request, app, ask), None
        except WireError as error:
            return await self.use_fallback(request, app, error)

    async def retry_until_answered(self, request: Request, app: AppResponse, ask: Attempt[T]) -> T:
        """Asks until there is an answer, as long as a request may be held. Raises the last
        WireError."""
        hold = RetrySchedule(max_hold_s(self._limit_s, request.app_headers), time.monotonic())
        while True:
            is_caused_by_siblings = self.sibling_limit.watch_engine()
            try:
                request = self._with_served_name(request)
                async with self._watchdog(hold.limit_s, app):
                    return await ask(request, is_caused_by_siblings)
            except WireError as error:
                reason = error.reason
                if reason is None or app.has_answer_data:
                    raise
                is_busy = reason is OutageReason.ENGINE_BUSY
                may_succeed = is_caused_by_siblings() if is_busy else self._may_become_ready
                pause_s = hold.pause(reason, time.monotonic(), may_succeed=may_succeed)
                if pause_s is None:
                    raise
            app.postpone_start()
            await self._pause(reason, pause_s)

    async def use_fallback(
        self, request: Request, app: AppResponse, error: WireError
    ) -> tuple[EngineResponse, OutageReason]:
        """The fallback's answer in the place of `error`, which is raised again where it has
        none."""
        if error.reason is None or self._fallback is None or app.has_answer_data:
            raise error
        try:
            return await self._fallback.relay(request, app), error.reason
        except WireError as failed:
            if app.has_answer_data:
                raise
            log.warning("the fallback does not answer either: %s", failed)
        raise error

    @property
    def _may_become_ready(self) -> bool:
        return self._link is None or self._link.may_become_ready

    async def _pause(self, reason: OutageReason, pause_s: float) -> None:
        """Until it is worth another try."""
        if reason is OutageReason.ENGINE_BUSY:
            self.sibling_limit.engine_refused()
            left = asyncio.Event()
            with contextlib.suppress(TimeoutError), self.sibling_limit.lead_waiting(left.set):
                # wait_for may lose a cancellation that comes with the event, up to Python 3.11
                async with asyncio.timeout(pause_s):
                    await left.wait()
        elif self._link is not None:
            await self._link.until_serving(pause_s)
        else:
            await asyncio.sleep(pause_s)

    def _with_served_name(self, request: Request) -> Request:
        """A name of the app's is replaced as soon as ours is known."""
        name = request.body.get("model") or request.model
        served = self._served_name(name) if isinstance(name, str) else None
        return request if served is None else with_model(request, served)

    def _watchdog(
        self, limit_s: float, app: AppResponse
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Around each time that it is asked."""
        if self._link is None:
            return contextlib.nullcontext()
        return HangWatchdog(self._link, app, limit_s, has_other=self._fallback is not None)


def failure_reason(error: WireError) -> str:
    """As the ledger shows it."""
    is_gone = error.reason in (OutageReason.SERVER_UNREACHABLE, OutageReason.SERVER_BROKE_OFF)
    return "upstream_unreachable" if is_gone else f"upstream_{error.status}"
