"""The life of one passive request: plan, sample, score, answer, settle. The async shell around the
pure parts."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import Any

from fakevllm.config import Config
from fakevllm.fanout import Verdict, decide
from fakevllm.group import GroupDraft
from fakevllm.hooks.outcomes import HookFailure, RewardOutcome
from fakevllm.hooks.spec import Sibling
from fakevllm.hooks.worker import HookWorker
from fakevllm.leaving import WhileThere
from fakevllm.ledger.records import GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm.metrics import Metrics
from fakevllm.policy import why_only_served
from fakevllm.relay import pass_on, relay
from fakevllm.reply import AppReply
from fakevllm.settling import Settling
from fakevllm.siblings import Plan, Request, SiblingResult, sample, with_apps_id
from fakevllm.upstream import Upstream
from fakevllm_adapters.asgi import ClientLeft, Receive, Send
from fakevllm_adapters.errors import WireError, internal_error, unavailable
from fakevllm_adapters.swarm import Task

log = logging.getLogger("fakevllm.runner")

LINGER_S = 0.25
"""How long an answer may still come to its end after its app has left: some clients hang up at the
event that ends an answer, before its last byte."""
CLOSE_GRACE_S = 2.0
"""For telling apps whose requests are cut off by the proxy's stop."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sampled group with what the hook made of it."""

    results: list[SiblingResult]
    rewards: dict[int, float | None]
    annotations: dict[int, dict[str, Any]]
    reason: str | None
    """Why there are no rewards."""
    hook_hash: str | None
    verdict: Verdict


class Runner:
    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        hooks: HookWorker | None,
        ledger: Ledger,
        settling: Settling,
    ) -> None:
        self.metrics = Metrics(lambda: len(self._open), lambda: ledger.health.dropped)
        self._temperature = config.job.temperature
        self._num_siblings = config.job.num_repeat
        self._upstream = upstream
        self._hooks = hooks
        self._ledger = ledger
        self._settling = settling
        self._chance = random.Random(config.job.seed)
        # The tasks of requests; bounded by the apps' connections.
        self._open: set[asyncio.Task[Any]] = set()

    async def handle(
        self, request: Request, draft: GroupDraft, receive: Receive, send: Send
    ) -> None:
        """Answers the app, whatever happens behind it."""
        own = asyncio.current_task()
        assert own is not None
        self._open.add(own)
        try:
            async with AppReply(send, request.adapter, request.exchange) as app:
                try:
                    await self._handle(request, draft, receive, app)
                except asyncio.CancelledError:
                    # Only a stop of the proxy cancels a request; its app is told so, and the task
                    # ends.
                    await app.break_off(unavailable("The proxy is stopping. Try again shortly."))
                    self._give_up(draft, "proxy_stopped", 503)
        finally:
            self._open.discard(own)

    async def close(self) -> None:
        """Cuts off what is still open. Uvicorn cancels requests at its stop, and does not wait."""
        if self._open:
            for task in self._open:
                if not task.cancelling():  # a second time would cut off the farewell
                    task.cancel()
            await asyncio.wait(self._open, timeout=CLOSE_GRACE_S)

    async def _handle(
        self, request: Request, draft: GroupDraft, receive: Receive, app: AppReply
    ) -> None:
        plan, reason = await self._plan(request, draft.task)
        draft.num_siblings = plan.num
        if reason is not None:
            await self._serve_once(request, draft, reason, receive, app)
        else:
            await self._serve_best(request, draft, plan, receive, app)

    async def _plan(self, request: Request, task: Task) -> tuple[Plan, str | None]:
        """How the request is sampled, and why it is only served if it is."""
        if request.exchange is None:
            return Plan(1), request.reason or "not_translated"
        if self._hooks is None:
            return Plan(1), why_only_served(request.body, 1)
        plan = Plan(self._num_siblings)
        if self._hooks.info.has_submit:
            asked = await self._hooks.submit(request.id, task)
            if isinstance(asked, HookFailure):
                return Plan(1), asked.reason
            if asked.overrides is not None:
                plan = Plan(len(asked.overrides), asked.overrides)
            elif asked.num is not None:
                plan = Plan(asked.num)
        reason = why_only_served(request.body, plan.num)
        return (plan, None) if reason is None else (Plan(1), reason)

    # --- one sibling: relayed as it comes

    async def _serve_once(
        self,
        request: Request,
        draft: GroupDraft,
        reason: str,
        receive: Receive,
        app: AppReply,
    ) -> None:
        try:
            async with WhileThere(receive, LINGER_S):
                reply = await relay(self._upstream, request, app)
            self._record(draft.served_once(reply, reason))
        except ClientLeft:
            self._record(draft.failed("client_disconnected", 499))
        except WireError as error:
            await app.refuse(error)
            self._record(draft.failed("upstream_unreachable", error.status))
        except Exception:  # isolates: a defect of ours must not leave the app without an answer
            log.exception("request %s failed", request.id)
            await app.break_off(internal_error())
            self._record(draft.failed("internal_error", 500))

    # --- several siblings: the best is returned

    async def _serve_best(
        self,
        request: Request,
        draft: GroupDraft,
        plan: Plan,
        receive: Receive,
        app: AppReply,
    ) -> None:
        try:
            async with WhileThere(receive):
                scored = await self._sample_and_score(request, draft.task, plan)
            await self._answer(app, request, scored)
        except ClientLeft:
            return self._give_up(draft, "client_disconnected", 499)
        except WireError as error:
            await app.refuse(error)
            return self._give_up(draft, "upstream_unreachable", error.status)
        except Exception:  # isolates: a defect of ours must not leave the app without an answer
            log.exception("request %s failed", request.id)
            await app.break_off(internal_error())
            return self._give_up(draft, "internal_error", 500)
        self._settle(draft.scored(scored))

    async def _sample_and_score(self, request: Request, task: Task, plan: Plan) -> Scored:
        results = await sample(self._upstream, request, plan, self._temperature)
        answered = [result for result in results if result.answer is not None]
        outcome = await self._score(request, task, answered)
        scores = outcome.rewards or [None] * len(answered)
        rewards = {result.index: reward for result, reward in zip(answered, scores, strict=True)}
        notes = {
            result.index: note for result, note in zip(answered, outcome.annotations, strict=False)
        }
        showable = [result.index for result in answered if request.can_show(result)]
        indices = [result.index for result in answered]
        verdict = decide(indices, rewards, self._chance, showable)
        return Scored(results, rewards, notes, outcome.reason, outcome.hook_hash or None, verdict)

    async def _score(
        self, request: Request, task: Task, answered: list[SiblingResult]
    ) -> RewardOutcome:
        assert self._hooks is not None
        if len(answered) < 2:
            return RewardOutcome(None, "no_group" if answered else "no_answer", [])
        siblings = [
            Sibling(
                result.index,
                task,
                f"{request.id}/{result.index}",
                result.answer.finish_reason,
                result.answer.usage,
            )
            for result in answered
            if result.answer is not None
        ]
        answers = [result.shown_message for result in answered]
        return await self._hooks.reward(siblings, answers, request.adapter.question(request.body))

    async def _answer(self, app: AppReply, request: Request, scored: Scored) -> None:
        """The served sibling's own answer; where none answered, the lead's trouble."""
        index = scored.verdict.served or 0
        shown = scored.results[index]
        if shown.reply is None:
            assert shown.error is not None
            return await app.refuse(shown.error)
        await pass_on(self._upstream, request, app, with_apps_id(shown.reply, request, index))

    def _give_up(self, draft: GroupDraft, reason: str, status: int) -> None:
        record: GroupRecord = draft.failed(reason, status)
        if draft.num_siblings > 1:
            self._settle(record)
        else:
            self._record(record)

    def _record(self, group: GroupRecord) -> None:
        self.metrics.ended(group)
        self._ledger.record(group)

    def _settle(self, group: GroupRecord) -> None:
        self.metrics.ended(group)
        self._settling.settle(group)
