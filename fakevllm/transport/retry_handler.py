"""Hold and retry a request while the engine is unavailable. If the retries fail, use the fallback
server, provided that one is configured. `retry_policy` makes the decisions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from fakevllm.config.model import DEFAULT_NUM_CALLS
from fakevllm.ledger.reasons import EndReason
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.call_slots import CallSlots
from fakevllm.transport.engine_client import EngineClient, EngineResponse
from fakevllm.transport.fallback_server import Fallback, with_model
from fakevllm.transport.hang_watchdog import HangWatchdog, NothingSent, SentAnswer
from fakevllm.transport.relay import relay
from fakevllm.transport.request import (
    Request,
    SiblingPlan,
    SiblingResult,
    begin_traced_call,
    end_traced_call,
)
from fakevllm.transport.request_arm import with_policy
from fakevllm.transport.retry_policy import RetrySchedule, max_hold_s
from fakevllm.transport.sibling_limit import SiblingLimit
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.outage_reasons import OutageReason

log = logging.getLogger("fakevllm.transport.retry_handler")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """The functions that a RetryHandler gives to a single attempt to get an answer."""

    is_caused_by_siblings: Callable[[], bool]
    """Function that returns True if the engine has sampled any sibling since the attempt began.
    Siblings are the calls that the proxy adds to the apps' own requests."""
    give_back_slot: Callable[[], None]
    """Function that gives back one slot before the attempt ends. An attempt that samples several
    siblings holds one slot for each of them."""


Attempt = Callable[[Request, AttemptContext], Awaitable[T]]
"""Function that requests one answer, or the answers of several siblings.

The attempt raises WireError for an outage. It also raises WireError for a 429 (too many requests)
if the engine has sampled siblings meanwhile, because the siblings may have caused the 429."""

LEAD_ONLY = SiblingPlan(1)
LEAD_TEMPERATURE = 0.0
"""Argument for a plan with a lead only. It has no effect, because a lead keeps its temperature."""


class RetryHandler:
    """Sends requests to the engine. During an outage, the handler retries requests. It also ends
    calls that hang. If the retries fail, it uses the fallback server."""

    def __init__(
        self,
        upstream: EngineClient,
        link: SwarmLink | None = None,
        limit_s: float = 0.0,
        fallback: Fallback | None = None,
        served_name: Callable[[str], str | None] = lambda _: None,
        sibling_limit: SiblingLimit | None = None,
        slots: CallSlots | None = None,
    ) -> None:
        """Create the handler. `link` polls the status of the swarm server. If `link` is None, the
        handler notices an outage only when a call fails. `limit_s` is the maximum number of seconds
        for which a request is held.

        `served_name` is a function. For an alias, it returns the served model's name. For any other
        name, it returns None. It raises WireError (503) if the server has not reported its model
        yet.

        `sibling_limit` counts the siblings (answers that are sampled for one request) that compete
        with this handler's requests for the engine. `slots` limits the number of calls that are
        open at the server at a time. If `slots` is None, a default limit applies.
        """
        self._upstream = upstream
        self._link = link
        self._limit_s = limit_s
        self._fallback = fallback
        self._served_name = served_name
        self.sibling_limit = sibling_limit or SiblingLimit()
        self.slots = slots or CallSlots(DEFAULT_NUM_CALLS)

    @property
    def num_waiting(self) -> int | None:
        """Number of requests that wait in the engine's queue, or None if the number is unknown."""
        return None if self._link is None else self._link.load_probe.num_waiting

    @property
    def server_shares_calls(self) -> bool:
        """Whether one call to the server may sample several siblings (answers to the same request).
        A server of an older version does not support such calls."""
        return self._link is None or self._link.server_shares_calls

    async def relay(
        self, request: Request, app: AppResponse, plan: SiblingPlan = LEAD_ONLY
    ) -> tuple[EngineResponse, OutageReason | None]:
        """Relay an answer to the app, and return (answer, reason of the outage). The reason is None
        if the engine gave the answer. If the fallback server gave the answer, the reason says why
        the engine did not answer.

        Raises WireError if no answer data has been sent to the app, and neither the engine nor the
        fallback server answers.
        """

        async def attempt(request: Request, context: AttemptContext) -> EngineResponse:
            begin_traced_call(request, plan, (0,), LEAD_TEMPERATURE)

            async def call() -> EngineResponse:
                return await relay(
                    self._upstream,
                    plan.lead_request(request),
                    app,
                    is_caused_by_siblings=context.is_caused_by_siblings,
                )

            return await with_policy(request.arm, call)

        try:
            return await self.retry_until_answered(request, app, attempt), None
        except WireError as error:
            end_traced_call(request, SiblingResult(0, error=error))
            return await self.use_fallback(request, app, error)

    async def retry_until_answered(
        self,
        request: Request,
        app: AppResponse,
        attempt: Attempt[T],
        *,
        is_lead: bool = True,
        num_slots: int = 1,
    ) -> T:
        """Call `attempt` until it returns an answer, and return the answer. If the retry policy
        gives up, raise the WireError of the last attempt.

        Each attempt first waits for `num_slots` slots. The slots limit the number of open calls. An
        attempt may have to wait for slots even if the server is available. Therefore this wait does
        not count against the time for which a request may be held.
        """
        schedule = RetrySchedule(max_hold_s(self._limit_s, request.app_headers), time.monotonic())
        while True:
            is_caused_by_siblings = self.sibling_limit.watch_engine()
            try:
                request = self._with_served_name(request)
                # The watchdog also covers the wait for a slot: hanging calls hold theirs for long.
                async with self._watchdog(schedule.limit_s, app):
                    queued_at = time.monotonic()
                    if is_lead and self.slots.must_wait(is_lead=True):
                        app.postpone_start()
                    async with self.slots.slot(is_lead=is_lead, num=num_slots) as give_back:
                        schedule.started_s += time.monotonic() - queued_at
                        return await attempt(
                            request, AttemptContext(is_caused_by_siblings, give_back)
                        )
            except WireError as error:
                reason = error.reason
                if reason is None or app.has_answer_data:
                    raise
                pause_s = self._pause_s(schedule, reason, is_caused_by_siblings)
                if pause_s is None:
                    raise
            app.postpone_start()
            await self._pause(reason, pause_s)

    async def fetch(
        self, attempt: Callable[[], Awaitable[T]], app_headers: Mapping[bytes, bytes]
    ) -> T:
        """Call `attempt` until it returns the complete response of a small route, such as
        /v1/models, and return the response. The request may wait for the engine for as long as a
        model call may. Unlike a model call, the request needs no slot and is never sent to the
        fallback server.

        `attempt` raises WireError for an outage. If the retry policy gives up, the WireError of the
        last attempt is raised.
        """
        schedule = RetrySchedule(max_hold_s(self._limit_s, app_headers), time.monotonic())
        while True:
            try:
                async with self._watchdog(schedule.limit_s, NothingSent()):
                    return await attempt()
            except WireError as error:
                reason = error.reason
                pause_s = None if reason is None else self._pause_s(schedule, reason, _never)
                if reason is None or pause_s is None:
                    raise
            await self._pause(reason, pause_s)

    async def use_fallback(
        self, request: Request, app: AppResponse, error: WireError
    ) -> tuple[EngineResponse, OutageReason]:
        """Relay the answer of the fallback server to the app, after the engine failed with `error`.
        Return the answer, and the outage reason that `error` has.

        Raises `error` itself in four cases:

        * `error` is not an outage.
        * Answer data has been sent to the app already.
        * No fallback server is configured.
        * The fallback server does not answer.

        If the fallback server fails after it has sent answer data to the app, this second error is
        raised.
        """
        if error.reason is None or self._fallback is None or app.has_answer_data:
            raise error
        if request.trace is not None:
            request.trace.begin_fallback()
        try:
            reply = await self._fallback.relay(request, app)
            if request.trace is not None:
                request.trace.end_fallback(reply.status)
            return reply, error.reason
        except WireError as fallback_error:
            if request.trace is not None:
                request.trace.end_fallback(fallback_error.status)
            if app.has_answer_data:
                raise
            log.warning("the fallback does not answer either: %s", fallback_error)
        raise error

    def _pause_s(
        self,
        schedule: RetrySchedule,
        reason: OutageReason,
        is_caused_by_siblings: Callable[[], bool],
    ) -> float | None:
        """Return the number of seconds until the next attempt, or None if the request must not be
        tried again. `reason` is the reason why the last attempt failed."""
        is_busy = reason is OutageReason.ENGINE_BUSY
        may_succeed = is_caused_by_siblings() if is_busy else self._may_become_ready
        return schedule.pause(
            reason,
            time.monotonic(),
            may_succeed=may_succeed,
            last_answered_s=math.inf if self._link is None else self._link.last_answered_s,
        )

    @property
    def _may_become_ready(self) -> bool:
        return self._link is None or self._link.may_become_ready

    async def _pause(self, reason: OutageReason, pause_s: float) -> None:
        """Wait up to `pause_s` seconds before the next attempt. If the engine refused the request
        because it was busy, stop waiting as soon as a sibling (an answer that is sampled for a
        request) has ended. After any other failure, stop waiting as soon as the engine is ready."""
        if reason is OutageReason.ENGINE_BUSY:
            self.sibling_limit.engine_refused()
            sibling_ended = asyncio.Event()
            waiting = self.sibling_limit.lead_waiting(sibling_ended.set)
            with contextlib.suppress(TimeoutError), waiting:
                # Up to Python 3.11, wait_for may lose a cancellation that comes with the event.
                async with asyncio.timeout(pause_s):
                    await sibling_ended.wait()
        elif self._link is not None:
            await self._link.until_serving(pause_s)
        else:
            await asyncio.sleep(pause_s)

    def _with_served_name(self, request: Request) -> Request:
        """Return the request, with the served model's name in place of an alias. Raises WireError
        (503) if the server has not reported its model yet."""
        name = request.body.get("model") or request.model
        served = self._served_name(name) if isinstance(name, str) else None
        return request if served is None else with_model(request, served)

    def _watchdog(
        self, limit_s: float, app: SentAnswer
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Return a watchdog for one attempt. If the handler does not poll the server's status, the
        watchdog does nothing."""
        if self._link is None:
            return contextlib.nullcontext()
        return HangWatchdog(self._link, app, limit_s, has_fallback=self._fallback is not None)


def _never() -> bool:
    return False


def failure_reason(error: WireError) -> str:
    """Return the reason that the ledger (the proxy's SQLite file) stores for a request that failed
    with this error."""
    is_gone = error.reason in (OutageReason.SERVER_UNREACHABLE, OutageReason.SERVER_BROKE_OFF)
    return EndReason.UPSTREAM_UNREACHABLE.value if is_gone else f"upstream_{error.status}"
