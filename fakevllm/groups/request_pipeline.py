"""The pipeline for the requests of apps. For each request, it plans how many answers are sampled.

A request that is not trained is sent to the engine once, and the answer is relayed to the app. A
request that is trained is passed to a `GroupExecutor`, which samples several answers (siblings).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fakevllm.admission.admission_rules import ServeOnly, is_shadow, why_only_served
from fakevllm.config.model import Config
from fakevllm.config.serving import ServeRules
from fakevllm.groups.group_context import GroupContext
from fakevllm.groups.group_executor import LINGER_S, STOPPING, GroupExecutor, GroupServices
from fakevllm.groups.group_record import GroupDraft
from fakevllm.groups.hook_failures import LatestHookFailures
from fakevllm.groups.hook_warnings import (
    OVERRIDES,
    SUBMIT,
    HookKind,
    HookWarnings,
    refused_override,
    reward_failure,
)
from fakevllm.groups.reproducible_lockstep import Lockstep
from fakevllm.groups.request_arms import RequestArms
from fakevllm.groups.resend_cache import ResendCache, ResendEntry
from fakevllm.groups.sampler import Sampler
from fakevllm.hooks.hook_versions import HookVersions
from fakevllm.hooks.results import HookFailure
from fakevllm.hooks.version_leases import Use
from fakevllm.ledger.reasons import EndReason
from fakevllm.ledger.records import GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm.metrics import Metrics
from fakevllm.runtime.disconnect import CancelOnDisconnect
from fakevllm.sessions.types import Place
from fakevllm.settlement.reward_delivery import Delivery
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient
from fakevllm.transport.request import Request, SiblingPlan
from fakevllm.transport.retry_handler import RetryHandler, failure_reason
from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.http.asgi import ClientDisconnected, Receive, Send
from fakevllm_adapters.protocol.errors import WireError, internal_error
from fakevllm_adapters.protocol.swarm import MAX_GROUP_SIZE, Task

log = logging.getLogger("fakevllm.groups.request_pipeline")

CLOSE_GRACE_S = 2.0
"""Maximum number of seconds for which a stopping proxy sends errors to the apps whose requests are
still open."""

WAIT_POLL_S = 0.05


class Pipeline:
    """The handler of all inference requests. It handles a request until the app has its answer."""

    def __init__(
        self,
        config: Config,
        upstream: EngineClient,
        hooks: HookVersions | None,
        ledger: Ledger,
        delivery: Delivery,
        retry_handler: RetryHandler,
        resends: ResendCache,
        metrics: Metrics,
        *,
        lockstep: Lockstep | None = None,
        on_placed: Callable[[str, Place | None, str], None] | None = None,
        on_scored: Callable[[Sequence[float]], None] | None = None,
        arms: RequestArms | None = None,
    ) -> None:
        """Create the pipeline. `hooks` is None if the user has no hook files. If there are hooks,
        the callback `on_placed` is called before each request is answered. Its arguments are the
        request's id, the request's place in its session (conversation), and the last user message.
        The callback `on_scored` is called with the rewards of each group that ends. `arms` assigns
        requests to arms. An arm decides which weights answer a session. `arms` is None if the
        newest weights answer all sessions."""
        serve = config.serve
        self._rules = {name: serve.rules(name) for name in ADAPTERS}
        self._has_receipts = serve.receipts
        self._retry_handler = retry_handler
        self._sibling_limit = retry_handler.sibling_limit
        self._metrics = metrics
        self._num_siblings = config.job.num_repeat
        self._hooks = hooks
        self._hook_warnings = HookWarnings(config.hooks.path or Path(), config.ledger_file)
        self.hook_failures = LatestHookFailures()
        """How many of the latest groups failed in a hook."""
        self._ledger = ledger
        self._delivery = delivery
        self._resends = resends
        self._lockstep = lockstep
        self._on_placed = on_placed
        self._on_scored = on_scored
        self._arms = arms
        # The asyncio tasks of open requests; bounded by the apps' connections.
        self._request_tasks: set[asyncio.Task[Any]] = set()
        self._executors: set[GroupExecutor] = set()
        self._num_awaited = 0
        """Number of siblings (additional samples of requests) that apps are waiting for."""
        self._services: GroupServices | None = None
        if hooks is not None:
            self._services = GroupServices(
                sampler=Sampler(upstream, retry_handler, config.job.temperature),
                hooks=hooks,
                sibling_limit=self._sibling_limit,
                rng=random.Random(config.job.seed),
                on_end=self._on_group_end,
                failure_floor=config.reward.failure_floor,
            )

    @property
    def num_open(self) -> int:
        """Number of requests that are being answered."""
        return len(self._request_tasks)

    async def wait_answered(self, timeout_s: float) -> int:
        """Wait for at most `timeout_s` seconds until all requests that are open now are answered,
        and their groups are recorded. Return the number of requests that are not finished by
        then."""
        deadline = time.monotonic() + timeout_s
        tasks, executors = set(self._request_tasks), set(self._executors)
        while tasks or executors:
            tasks &= self._request_tasks
            executors &= self._executors
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(WAIT_POLL_S)
        return max(len(tasks), len(executors))

    async def handle(self, draft: GroupDraft, receive: Receive, send: Send) -> None:
        """Handle one request. The app gets an answer, or an error if no answer is possible."""
        request, attempt = draft.request, draft.attempt
        own_task = self._track_task()
        try:
            if self._arms is not None:
                self._assign(self._arms, draft)
            async with AppResponse(
                send,
                request.adapter,
                request.exchange,
                group_id=request.id if self._has_receipts else None,
                on_stream_started=draft.stream_began,
            ) as app:
                draft.app = app
                try:
                    watched = app.watching(
                        receive, partial(self._resends.client_disconnected, attempt)
                    )
                    context = GroupContext(draft, self._rules_for(request), app, watched)
                    hooks = self._hooks
                    with hooks.using(request.id, Use.REQUEST) if hooks else nullcontext():
                        await self._handle(context)
                except asyncio.CancelledError:
                    # Only a stop of the proxy cancels a request. The app gets an error, and the
                    # task ends. A group has sent that error itself.
                    await app.end_with_error(STOPPING)
                    self._record(request, draft.failed(EndReason.PROXY_STOPPED.value, 503))
                finally:
                    self._resends.ended(attempt, app, is_answered=draft.is_answered_well)
        finally:
            self._request_tasks.discard(own_task)

    def _assign(self, arms: RequestArms, draft: GroupDraft) -> None:
        try:
            arms.assign(draft)
        except Exception:  # isolates: trouble with arms never reaches the app
            log.exception("request %s could not be assigned to an arm", draft.request.id)
            draft.request.arm = None

    async def answer_resend(
        self, request: Request, entry: ResendEntry, receive: Receive, send: Send
    ) -> bool:
        """Answer a retry of a request with the answer to the first attempt. `entry` is the cache
        entry of the request.

        Return False if the first attempt failed and nothing was sent to the app. The caller must
        then handle the retry as a new request. Return True in all other cases.
        """
        own_task = self._track_task()
        try:
            group_id = entry.pending.group_id if self._has_receipts else None
            async with AppResponse(
                send, request.adapter, request.exchange, group_id=group_id
            ) as app:
                try:
                    is_answered = await self._resends.deliver(entry, app, app.watching(receive))
                except ClientDisconnected:
                    return True
                except asyncio.CancelledError:
                    await app.end_with_error(STOPPING)
                    return True
        finally:
            self._request_tasks.discard(own_task)
        if is_answered:
            self._metrics.request_resent(request.adapter.path)
        return is_answered

    def _track_task(self) -> asyncio.Task[Any]:
        """Add the current asyncio task to the tasks that `close` cancels, and return the task."""
        task = asyncio.current_task()
        assert task is not None
        self._request_tasks.add(task)
        return task

    async def close(self) -> None:
        """Cancel all open requests and running groups, and wait until they have ended.

        When uvicorn stops, it cancels open requests too, but it does not wait until they have
        ended.
        """
        if self._request_tasks:
            for task in self._request_tasks:
                if not task.cancelling():  # a second cancel would interrupt the error to the app
                    task.cancel()
            await asyncio.wait(self._request_tasks, timeout=CLOSE_GRACE_S)
        executors = list(self._executors)
        for executor in executors:  # their apps have been answered
            executor.stop()
        await asyncio.gather(*(executor.wait_closed() for executor in executors))

    async def _handle(self, context: GroupContext) -> None:
        draft = context.draft
        if self._hooks is not None:  # without hooks, the place is computed after the answer
            place = draft.place()
            draft.request.session = None if place is None else place.session_id
            if self._on_placed is not None:
                self._on_placed(draft.request.id, place, draft.question)
        if self._arms is not None:
            await self._arms.prepare(draft.request)
        plan, reason = await self._plan(context.request, draft.task, context.rules)
        is_group = reason is None
        lockstep = self._lockstep
        slot = lockstep.slot(draft.task, is_group=is_group) if lockstep else nullcontext()
        async with slot as seed:
            if is_group:
                plan, reason = self._limit_siblings(plan, context)
            context.plan = plan if seed is None else replace(plan, seed=seed)
            draft.num_siblings = plan.num
            if reason is not None:
                await self._serve_single(context, reason)
            else:
                await self._run_group(context)

    async def _run_group(self, context: GroupContext) -> None:
        assert self._services is not None, "without hooks, every request is only served"
        executor = GroupExecutor(self._services, context)
        self._executors.add(executor)
        self._services.hooks.begin(context.request.id, Use.SIBLINGS)
        num_awaited = _num_awaited(context.plan, context.rules)
        self._num_awaited += num_awaited
        try:
            await executor.answer_app()
        finally:
            self._num_awaited -= num_awaited

    def _rules_for(self, request: Request) -> ServeRules:
        rules = self._rules[request.adapter.name]
        if is_shadow(request.ruling):
            return ServeRules(policy="lead", on_disconnect=rules.on_disconnect)
        return rules

    async def _plan(
        self, request: Request, task: Task, rules: ServeRules
    ) -> tuple[SiblingPlan, str | None]:
        """Return the pair (plan, reason) for a request. The plan has the number of siblings
        (answers to sample), and the request fields that each sibling changes. The reason is None if
        the request is trained. Otherwise, it is the slug of the reason why the request is sampled
        once and not trained."""
        if isinstance(request.ruling, ServeOnly):
            return SiblingPlan(1), request.ruling.recorded_reason
        if request.exchange is None:
            return SiblingPlan(1), request.no_exchange_reason or "not_translated"
        num = request.ruling.num or self._num_siblings
        if self._hooks is None:
            return SiblingPlan(1), why_only_served(request.body, 1)
        overrides: list[Json] = []
        hooks = self._hooks.of_group(request.id)
        if hooks.info.has_submit:
            trace = request.trace
            call = None if trace is None else trace.begin_hook(SUBMIT.name)
            submitted = await hooks.submit(request.id, task)
            if trace is not None and call is not None:
                failure = submitted.reason if isinstance(submitted, HookFailure) else None
                trace.end_hook(call, failure, hooks.info.content_hash)
            if isinstance(submitted, HookFailure):
                self.hook_failures.add(submitted.reason, self._hooks.info.content_hash)
                self._log_hook_failure(SUBMIT, submitted.reason, request.id)
                return SiblingPlan(1), submitted.reason
            overrides = submitted.overrides or []
            num = len(overrides) or submitted.num or num
        is_greedy = rules.policy == "greedy"
        body = request.body
        if is_greedy:  # the lead is sampled greedily, whatever temperature the app sends
            body = {name: value for name, value in body.items() if name != "temperature"}
        reason = why_only_served(body, num)
        if is_greedy and not overrides:
            num = min(num + 1, MAX_GROUP_SIZE)  # the greedy lead is an additional sibling
        return (
            (SiblingPlan(num, overrides, is_greedy), None)
            if reason is None
            else (SiblingPlan(1), reason)
        )

    def _limit_siblings(
        self, plan: SiblingPlan, context: GroupContext
    ) -> tuple[SiblingPlan, str | None]:
        """Return a pair (plan, reason). The returned plan is the given plan, with fewer siblings if
        the engine has too little capacity for all of them.

        If there is capacity only for the lead (the app's own request), the request is not trained,
        and the reason is a slug. In all other cases, the reason is None.
        """
        granted = self._sibling_limit.acquire(
            plan.num - 1,
            num_awaited=self._num_awaited + _num_awaited(plan, context.rules),
            num_waiting=self._retry_handler.num_waiting,
        )
        if granted.num == 0:
            return replace(plan, num=1), granted.cut_reason
        context.draft.cut_reason = granted.cut_reason
        return replace(plan, num=granted.num + 1), None

    async def _serve_single(self, context: GroupContext, reason: str) -> None:
        """Sample the request once, and stream the answer to the app as it arrives. `reason` is the
        slug of the reason why the request is not sampled several times."""
        request, draft, app = context.request, context.draft, context.app
        try:
            async with CancelOnDisconnect(context.receive, LINGER_S):
                reply, trouble = await self._retry_handler.relay(request, app, context.plan)
            draft.mark_answered()
            if reply.status == 200:
                self._sibling_limit.request_succeeded()
            if trouble is None:
                self._record(request, draft.served_once(reply, reason))
            else:
                self._record(request, draft.fell_back(reply, trouble))
        except ClientDisconnected:
            self._record(request, draft.failed(EndReason.CLIENT_DISCONNECTED.value, 499))
        except WireError as error:
            await app.refuse(error)
            self._record(request, draft.failed(failure_reason(error), error.status))
        except Exception:  # isolates: a proxy bug must not leave the app without an answer
            log.exception("request %s failed", request.id, extra={"group": request.id})
            await app.end_with_error(internal_error())
            self._record(request, draft.failed(EndReason.INTERNAL_ERROR.value, 500))

    def _on_group_end(self, executor: GroupExecutor, group: GroupRecord) -> None:
        self._executors.discard(executor)
        hook, reason = reward_failure(group)
        self._log_hook_failure(hook, reason, group.group_id)
        if executor.has_overrides:
            self._log_hook_failure(OVERRIDES, refused_override(group.siblings), group.group_id)
        assert self._hooks is not None, "without hooks, there are no groups"
        self.hook_failures.add(reason, self._hooks.info.content_hash)
        if executor.request.is_captured:
            self._metrics.group_ended(group)
            _finish_trace(executor.request, group)
            # `on_feedback` of the same version adds to the reward; the delivery ends this use
            self._hooks.begin(group.group_id, Use.FEEDBACK)
            self._delivery.settle(group)
        else:
            self._record(executor.request, group)  # the server knows nothing of it
        self._hooks.end(group.group_id, Use.SIBLINGS)
        if self._on_scored is not None:
            self._on_scored([one.reward for one in group.siblings if one.reward is not None])
        if self._arms is not None:
            self._arms.group_ended(executor.request, group)

    def _log_hook_failure(self, hook: HookKind, reason: str | None, group_id: str) -> None:
        line = self._hook_warnings.line(hook, reason, time.monotonic())
        if line is not None:
            log.warning("%s", line, extra={"group": group_id})

    def _record(self, request: Request, group: GroupRecord) -> None:
        """Write the record of an untrained request to the ledger, and count the request in the
        metrics. If the request may not be stored, only count it."""
        self._metrics.group_ended(group)
        _finish_trace(request, group)
        if request.is_stored:
            self._ledger.record(group)
        self._delivery.forget(group.group_id)


def _finish_trace(request: Request, group: GroupRecord) -> None:
    if request.trace is None:
        return
    try:
        request.trace.finish(group)
    except Exception:  # isolates: spans are never worth a failed request
        log.exception("request %s has no spans", request.id, extra={"group": request.id})


def _num_awaited(plan: SiblingPlan, rules: ServeRules) -> int:
    """Return the number of siblings for which the app waits. The lead, which is the app's own
    request, is not counted.

    The result is 0 if the lead's answer is streamed, because the app then waits for no other
    sibling.
    """
    return 0 if rules.streams_lead else plan.num - 1
