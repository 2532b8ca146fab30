"""The life of one passive request: planned, then relayed as it comes, or fanned out."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fakevllm.admission.rules import ServeOnly, is_shadow, why_only_served
from fakevllm.config.model import Config
from fakevllm.config.serving import ServeRules
from fakevllm.groups.executor import LINGER_S, STOPPING, GroupExecutor, GroupServices
from fakevllm.groups.hook_warnings import (
    OVERRIDES,
    REWARD,
    SUBMIT,
    HookKind,
    HookWarnings,
    refused_override,
)
from fakevllm.groups.lockstep import Lockstep
from fakevllm.groups.record import GroupDraft
from fakevllm.groups.resend_cache import ResendCache, ResendEntry
from fakevllm.groups.sampler import Sampler
from fakevllm.hooks.results import HookFailure
from fakevllm.hooks.worker import HookWorker
from fakevllm.ledger.records import GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm.metrics import Metrics
from fakevllm.runtime.disconnect import CancelOnDisconnect
from fakevllm.sessions.types import Place
from fakevllm.settlement.delivery import Delivery
from fakevllm.transport.app_response import AppReply
from fakevllm.transport.engine_client import Upstream
from fakevllm.transport.request import Plan, Request
from fakevllm.transport.retry import Lifeline, why_failed
from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.http.asgi import ClientDisconnected, Receive, Send
from fakevllm_adapters.protocol.errors import WireError, internal_error
from fakevllm_adapters.protocol.swarm import MAX_GROUP_SIZE, Task

log = logging.getLogger("fakevllm.groups.pipeline")

CLOSE_GRACE_S = 2.0
"""For telling apps whose requests are cut off by the proxy's stop."""


class Pipeline:
    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        hooks: HookWorker | None,
        ledger: Ledger,
        settling: Delivery,
        lifeline: Lifeline,
        resends: ResendCache,
        lockstep: Lockstep | None = None,
    ) -> None:
        serve = config.serve
        self._rules = {name: serve.rules(name) for name in ADAPTERS}
        self._lifeline = lifeline
        self._room = lifeline.room
        self.metrics = Metrics(
            lambda: len(self._open), lambda: ledger.health.dropped, lambda: self._room.in_flight
        )
        self._num_siblings = config.job.num_repeat
        self._asking = Sampler(upstream, self._lifeline, config.job.temperature)
        self._hooks = hooks
        self._failing = HookWarnings(config.hooks.path or Path(), config.ledger_file)
        self._failure_floor = config.reward.failure_floor
        self._ledger = ledger
        self._settling = settling
        self._resends = resends
        self._lockstep = lockstep
        self._chance = random.Random(config.job.seed)
        # The tasks of requests; bounded by the apps' connections.
        self._open: set[asyncio.Task[Any]] = set()
        self._groups: set[GroupExecutor] = set()
        self._num_awaited = 0
        """Siblings that apps wait for."""
        self.on_placed: Callable[[str, Place | None, str], None] | None = None
        """Told of a request, its place and its question, before it is answered."""

    async def handle(
        self, request: Request, draft: GroupDraft, receive: Receive, send: Send
    ) -> None:
        """Answers the app, whatever happens behind it."""
        own, attempt = self._opened(), draft.attempt
        try:
            async with AppReply(send, request.adapter, request.exchange) as app:
                draft.app = app
                try:
                    watched = app.watching(receive, partial(self._resends.left, attempt))
                    await self._handle(request, draft, watched, app)
                except asyncio.CancelledError:
                    # Only a stop of the proxy cancels a request; its app is told so, and the task
                    # ends. A group has done so itself.
                    await app.break_off(STOPPING)
                    self._record(draft.failed("proxy_stopped", 503))
                finally:
                    self._resends.ended(attempt, app, is_answered=draft.is_answered_well)
        finally:
            self._open.discard(own)

    async def handle_again(
        self, request: Request, attempt: ResendEntry, receive: Receive, send: Send
    ) -> bool:
        """Gives the app the answer to the same request sent before. False: there is none."""
        own = self._opened()
        try:
            async with AppReply(send, request.adapter, request.exchange) as app:
                try:
                    is_told = await self._resends.tell_again(attempt, app, app.watching(receive))
                except ClientDisconnected:
                    return True
                except asyncio.CancelledError:
                    await app.break_off(STOPPING)
                    return True
        finally:
            self._open.discard(own)
        if is_told:
            self.metrics.resent(request.adapter.path)
        return is_told

    def _opened(self) -> asyncio.Task[Any]:
        """The request's own task, to be cut off by a stop."""
        own = asyncio.current_task()
        assert own is not None
        self._open.add(own)
        return own

    async def close(self) -> None:
        """Cuts off what is still open. Uvicorn cancels requests at its stop, and does not wait."""
        if self._open:
            for task in self._open:
                if not task.cancelling():  # a second time would cut off the farewell
                    task.cancel()
            await asyncio.wait(self._open, timeout=CLOSE_GRACE_S)
        groups = list(self._groups)
        for group in groups:  # whose apps have been answered
            group.stop()
        await asyncio.gather(*(group.closed() for group in groups))

    async def _handle(
        self, request: Request, draft: GroupDraft, receive: Receive, app: AppReply
    ) -> None:
        rules = self._rules_of(request)
        draft.on_given = self._settling.answered
        app.on_begun = draft.begins
        if self._hooks is not None:  # else it has no place before the app has its answer
            place = draft.place()
            if self.on_placed is not None:
                self.on_placed(request.id, place, draft.question)
        plan, reason = await self._plan(request, draft.task, rules)
        lockstep = self._lockstep
        is_group = reason is None
        turn = lockstep.turn(draft.task, is_group=is_group) if lockstep else nullcontext()
        async with turn as seed:
            if is_group:
                plan, reason = self._fitting(plan, rules, draft)
            plan = replace(plan, seed=seed)
            draft.num_siblings = plan.num
            if reason is not None:
                return await self._serve_once(request, draft, plan, reason, receive, app)
            await self._run_group(request, draft, plan, rules, receive, app)

    async def _run_group(
        self,
        request: Request,
        draft: GroupDraft,
        plan: Plan,
        rules: ServeRules,
        receive: Receive,
        app: AppReply,
    ) -> None:
        assert self._hooks is not None
        floor = self._failure_floor
        means = GroupServices(self._asking, self._hooks, self._room, self._chance, self._end, floor)
        run = GroupExecutor(means, request, draft, plan, rules, app)
        self._groups.add(run)
        num_awaited = _num_awaited(plan, rules)
        self._num_awaited += num_awaited
        try:
            await run.answer(receive)
        finally:
            self._num_awaited -= num_awaited

    def _rules_of(self, request: Request) -> ServeRules:
        rules = self._rules[request.adapter.name]
        if is_shadow(request.ruling):
            return ServeRules(policy="lead", on_disconnect=rules.on_disconnect)
        return rules

    async def _plan(
        self, request: Request, task: Task, rules: ServeRules
    ) -> tuple[Plan, str | None]:
        """How the request is sampled, and why it is only served if it is."""
        if isinstance(request.ruling, ServeOnly):
            return Plan(1), request.ruling.recorded_reason
        if request.exchange is None:
            return Plan(1), request.reason or "not_translated"
        num = request.ruling.num or self._num_siblings
        if self._hooks is None:
            return Plan(1), why_only_served(request.body, 1)
        overrides: list[Json] = []
        if self._hooks.info.has_submit:
            asked = await self._hooks.submit(request.id, task)
            if isinstance(asked, HookFailure):
                self._hook_failed(SUBMIT, asked.reason, request.id)
                return Plan(1), asked.reason
            overrides = asked.overrides or []
            num = len(overrides) or asked.num or num
        is_greedy = rules.policy == "greedy"
        body = request.body
        if is_greedy:  # the lead is, whatever the app asks for
            body = {name: value for name, value in body.items() if name != "temperature"}
        reason = why_only_served(body, num)
        if is_greedy and not overrides:
            num = min(num + 1, MAX_GROUP_SIZE)  # beside those that explore
        return (Plan(num, overrides, is_greedy), None) if reason is None else (Plan(1), reason)

    def _fitting(self, plan: Plan, rules: ServeRules, draft: GroupDraft) -> tuple[Plan, str | None]:
        """As many of them as the engine has room for; a lead alone is only served, as it would have
        been among them."""
        granted = self._room.take(
            plan.num - 1,
            num_awaited=self._num_awaited + _num_awaited(plan, rules),
            num_waiting=self._lifeline.num_waiting,
        )
        if granted.num == 0:
            return replace(plan, num=1), granted.cut
        draft.cut = granted.cut
        return replace(plan, num=granted.num + 1), None

    # --- one sibling: relayed as it comes

    async def _serve_once(
        self,
        request: Request,
        draft: GroupDraft,
        plan: Plan,
        reason: str,
        receive: Receive,
        app: AppReply,
    ) -> None:
        try:
            async with CancelOnDisconnect(receive, LINGER_S):
                reply, trouble = await self._lifeline.relay(request, app, plan)
            draft.is_answered()
            if reply.status == 200:
                self._room.went_well()
            served, fell_back = draft.served_once, draft.fell_back
            self._record(fell_back(reply, trouble) if trouble else served(reply, reason))
        except ClientDisconnected:
            self._record(draft.failed("client_disconnected", 499))
        except WireError as error:
            await app.refuse(error)
            self._record(draft.failed(why_failed(error), error.status))
        except Exception:  # isolates: a defect of ours must not leave the app without an answer
            log.exception("request %s failed", request.id, extra={"group": request.id})
            await app.break_off(internal_error())
            self._record(draft.failed("internal_error", 500))

    def _end(self, run: GroupExecutor, group: GroupRecord) -> None:
        self._groups.discard(run)
        if group.state == "dropped":
            self._hook_failed(REWARD, group.reason, group.group_id)
        if run.has_overrides:
            self._hook_failed(OVERRIDES, refused_override(group.siblings), group.group_id)
        self.metrics.ended(group)
        self._settling.settle(group)

    def _hook_failed(self, hook: HookKind, reason: str | None, group_id: str) -> None:
        told = self._failing.line(hook, reason, time.monotonic())
        if told is not None:
            log.warning("%s", told, extra={"group": group_id})

    def _record(self, group: GroupRecord) -> None:
        self.metrics.ended(group)
        self._ledger.record(group)
        self._settling.forget(group.group_id)


def _num_awaited(plan: Plan, rules: ServeRules) -> int:
    return 0 if rules.streams_lead else plan.num - 1
