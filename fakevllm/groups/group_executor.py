"""Execution of one group (a request with its siblings, the answers that are sampled for it). This
module has the asyncio code. `sibling_scheduler.py` makes the decisions.

Usually, the asyncio task that handles the app's request waits until an answer is chosen, and sends
this answer. Other tasks sample the siblings and compute the rewards. If the lead (sibling 0) is to
be streamed to the app, the task that samples the lead sends the answer. The other tasks may go on
after the app has its answer.

When a task ends, the executor reports this event to its `GroupScheduler`. The scheduler is a state
machine that returns decisions, and the executor carries them out.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from fakevllm.admission.admission_rules import is_shadow
from fakevllm.groups import sibling_scheduler
from fakevllm.groups.group_context import GroupContext
from fakevllm.groups.group_record import ScoredSiblings
from fakevllm.groups.sampler import Sampler
from fakevllm.groups.scoring import score
from fakevllm.groups.sibling_scheduler import (
    AppState,
    BreakOff,
    Decision,
    GroupScheduler,
    Refuse,
    Serve,
)
from fakevllm.groups.sibling_selection import seeded_random
from fakevllm.hooks.hook_versions import HookVersions
from fakevllm.hooks.results import RewardOutcome
from fakevllm.ledger.reasons import EndReason
from fakevllm.ledger.records import GroupRecord
from fakevllm.transport.engine_client import EngineResponse
from fakevllm.transport.relay import pass_on
from fakevllm.transport.request import (
    Request,
    SiblingResult,
    end_traced_call,
    outcome_of,
    read_answer,
    with_app_id,
)
from fakevllm.transport.shared_call import NotShared
from fakevllm.transport.sibling_limit import SiblingLimit
from fakevllm_adapters.http.asgi import wait_for_disconnect
from fakevllm_adapters.protocol.errors import WireError, internal_error, unavailable
from fakevllm_adapters.protocol.outage_reasons import OutageReason

log = logging.getLogger("fakevllm.groups.request_pipeline")

LINGER_S = 0.25
"""Seconds between the disconnect of an app whose answer is being streamed, and the reaction to the
disconnect. Some clients close the connection when they receive the event that ends an answer,
although the proxy has not sent the last byte yet. The delay lets the proxy finish, so that the
answer counts as delivered."""
STOPPING = unavailable("The proxy is stopping. Try again shortly.")
"""The error for apps whose requests are cancelled because the proxy is stopping."""

_STATUS = {
    EndReason.CLIENT_DISCONNECTED.value: 499,
    EndReason.PROXY_STOPPED.value: 503,
    EndReason.UPSTREAM_UNREACHABLE.value: 503,
}
"""HTTP status that the ledger records for an aborted group, by the reason of the abort. For any
other reason, the status is 500."""


@dataclass(frozen=True, slots=True)
class GroupServices:
    """The objects that all groups of a proxy share."""

    sampler: Sampler
    hooks: HookVersions
    sibling_limit: SiblingLimit
    rng: random.Random
    """Random number generator for requests that have no seed."""
    on_end: Callable[[GroupExecutor, GroupRecord], None]
    """Callback that is called once per group, when the group ends. Its arguments are the executor
    and the group's ledger record."""
    failure_floor: float | None = None


class GroupExecutor:
    """The executor of one group (a request with its siblings, the answers that are sampled for it).
    It samples and scores the siblings, answers the app, and creates the ledger record.

    `services.sibling_limit` limits the number of siblings that run at one time. Each sibling except
    the lead (sibling 0) needs a slot of this limit. The caller must have acquired these slots. The
    executor releases a slot when the sibling that holds it ends.
    """

    def __init__(self, services: GroupServices, context: GroupContext) -> None:
        self._services = services
        self._context = context
        self._request = context.request
        self._draft = context.draft
        self._plan = context.plan
        self._app = context.app
        self._log = logging.LoggerAdapter(log, {"group": self._request.id})
        can_stream = self._request.streamed or is_shadow(self._request.ruling)
        seed = context.plan.lead_seed(self._request)
        rng = services.rng if seed is None else seeded_random(seed, self._draft.question)
        self._scheduler = GroupScheduler(
            context.plan.num, context.rules, rng, can_stream=can_stream
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Task by sibling index. Siblings that share a call have the same task."""
        self._cancelled: set[int] = set()
        self._held: set[int] = set()
        """Siblings that hold a slot of the sibling limit."""
        self._scoring: asyncio.Task[None] | None = None
        self._results: dict[int, SiblingResult] = {}
        self._outcome: RewardOutcome | None = None
        self._annotations: dict[int, dict[str, Any]] = {}
        loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Serve | Refuse | BreakOff | None] = loop.create_future()
        """Future of the scheduler's decision about the app's answer. Its result is None if nothing
        is to be sent, because the app has its answer already or has disconnected."""
        self._fallback_reply: tuple[EngineResponse, OutageReason] | None = None
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def request(self) -> Request:
        return self._request

    @property
    def has_overrides(self) -> bool:
        return bool(self._plan.overrides)

    async def answer_app(self) -> None:
        """Run the group (the request with its siblings). Return when the app has got its answer or
        an error, or when the app has disconnected. Siblings that are still being sampled then
        continue in the background, unless the group was aborted."""
        watch = asyncio.create_task(wait_for_disconnect(self._context.receive))
        watch.add_done_callback(self._on_disconnect)
        try:
            self._begin()
            await self._send_answer(await self._answer)
        except asyncio.CancelledError:
            # Only a stop of the proxy cancels a request. The app gets an error, and the task ends.
            self.stop()
            await self.wait_closed()
            await self._app.end_with_error(STOPPING)
        except WireError as error:
            await self._app.refuse(error)
            self._execute(self._scheduler.abort(EndReason.UPSTREAM_UNREACHABLE.value))
        except Exception:  # isolates: a proxy bug must not leave the app without an answer
            self._log.exception("request %s failed", self._request.id)
            self._execute(self._scheduler.abort(EndReason.INTERNAL_ERROR.value))
            await self._app.end_with_error(internal_error())
        finally:
            watch.remove_done_callback(self._on_disconnect)
            watch.cancel()
        self._draft.mark_answered()
        self._execute(self._scheduler.answer_sent())

    def stop(self) -> None:
        """Abort the group (a request with its siblings) because the proxy is stopping."""
        self._execute(self._scheduler.abort(EndReason.PROXY_STOPPED.value))

    def pass_deadline(self) -> None:
        """Report to the scheduler that the deadline for the app's answer has passed. From then on,
        one sampled answer is enough, and the app no longer waits for the configured number of
        answers (the quorum)."""
        self._execute(self._scheduler.deadline_passed())

    async def wait_closed(self) -> None:
        """Wait for all tasks of the group, including cancelled tasks."""
        tasks = {task for task in [*self._tasks.values(), self._scoring] if task is not None}
        if tasks:
            await asyncio.wait(tasks)

    # --- events

    def _begin(self) -> None:
        deadline_s = self._context.rules.deadline_s
        if deadline_s is not None:
            self._call_later(deadline_s, self.pass_deadline)
        self._execute(self._scheduler.begin())

    def _on_disconnect(self, watch: asyncio.Task[None]) -> None:
        if watch.cancelled():
            return
        linger_s = LINGER_S if self._scheduler.app is AppState.RELAYED else 0.0
        self._call_later(linger_s, self._report_disconnect)

    def _report_disconnect(self) -> None:
        self._execute(self._scheduler.app_disconnected())

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, callback))

    async def _run_sibling(self, index: int, *, is_relayed: bool) -> None:
        sampler = self._services.sampler
        try:
            if is_relayed:
                result = await self._relay_lead()
            else:
                result = await sampler.sample(self._request, self._plan, index, self._app)
        except Exception:  # isolates: a proxy bug must not leave the app without an answer
            return self._fail(index)
        self._finish(result, is_relayed=is_relayed)

    async def _run_shared_call(self, indices: tuple[int, ...]) -> None:
        """Sample these siblings with one call to the engine. If they cannot share a call, sample
        each sibling with a call of its own."""
        sampler = self._services.sampler
        try:
            await sampler.sample_shared(self._request, self._plan, indices, self._app, self._finish)
        except NotShared:
            singles = [self._run_sibling(index, is_relayed=False) for index in indices]
            await asyncio.gather(*singles)
        except Exception:  # isolates, as above
            self._fail(indices[0])

    def _fail(self, index: int) -> None:
        self._log.exception("sibling %d of request %s failed", index, self._request.id)
        self._execute(self._scheduler.abort(EndReason.INTERNAL_ERROR.value))

    def _finish(self, result: SiblingResult, *, is_relayed: bool = False) -> None:
        """Report the end of a sibling to the scheduler. Do nothing if the scheduler has already
        cancelled this sibling."""
        index = result.index
        if index in self._cancelled:
            return
        if not is_relayed:
            end_traced_call(self._request, result)
        try:
            outcome = outcome_of(self._request, result)
        except Exception:  # isolates, as above
            return self._fail(index)
        self._results[index] = result
        if is_relayed:
            self._draft.mark_answered()
            # In the state RELAYED, the group was not aborted. The app may still have disconnected,
            # if `on_disconnect` is `finish`. A resend of the request then gets this answer.
            if self._scheduler.app is AppState.RELAYED:
                self._draft.serve(result)
            self._resolve_answer(None)
        self._execute(self._scheduler.sibling_finished(index, outcome))
        self._release((index,))

    async def _relay_lead(self) -> SiblingResult:
        """Sample the lead (sibling 0), and return the result. Stream the answer to the app at the
        same time."""
        try:
            reply = await self._services.sampler.relay(
                self._request, self._plan, self._app, self._on_lead_token
            )
        except WireError as error:
            result = SiblingResult(0, error=error)
            end_traced_call(self._request, result)
            await self._refuse(error)
            return result
        result = SiblingResult(0, reply, read_answer(self._request, reply))
        end_traced_call(self._request, result)
        return result

    def _on_lead_token(self) -> None:
        self._execute(self._scheduler.lead_began())

    async def _refuse(self, error: WireError) -> None:
        """Let the fallback server answer the app, because the engine has failed with `error`. If
        the fallback server gives no answer, send an error to the app.

        The answer of the fallback server is not trained.
        """
        try:
            self._fallback_reply = await self._services.sampler.retry_handler.use_fallback(
                self._request, self._app, error
            )
            self._draft.is_answered_well = True
        except WireError as refusal:
            await self._app.refuse(refusal)

    async def _score(self, indices: tuple[int, ...]) -> None:
        results = [self._results[index] for index in indices]
        try:
            services = self._services
            hooks = services.hooks.of_group(self._request.id)
            outcome = await score(hooks, self._draft, results, services.failure_floor)
        except Exception:  # isolates, as above
            self._log.exception("request %s could not be scored", self._request.id)
            return self._execute(self._scheduler.abort(EndReason.INTERNAL_ERROR.value))
        self._scoring = None
        self._outcome = outcome
        rewards = outcome.rewards or [None] * len(indices)
        self._annotations = dict(zip(indices, outcome.annotations, strict=False))
        self._execute(self._scheduler.scoring_finished(dict(zip(indices, rewards, strict=True))))

    # --- decisions

    def _execute(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case sibling_scheduler.Relay():
                    self._start((0,), self._run_sibling(0, is_relayed=True))
                case sibling_scheduler.Start(indices):
                    self._start_all(indices)
                case sibling_scheduler.Cancel(indices):
                    self._cancelled.update(indices)
                    for task in {self._tasks[index] for index in indices}:
                        task.cancel()
                case sibling_scheduler.Score(indices):
                    self._scoring = asyncio.create_task(self._score(indices))
                case sibling_scheduler.Settle():
                    self._end(None)
                case sibling_scheduler.Abort(reason):
                    self._end(reason)
                case Serve() | Refuse() | BreakOff():
                    self._resolve_answer(decision)

    def _start_all(self, indices: tuple[int, ...]) -> None:
        for call in self._services.sampler.calls(self._request, self._plan, indices):
            first, *others = call
            if others:
                self._start(call, self._run_shared_call(call))
            else:
                self._start(call, self._run_sibling(first, is_relayed=False))

    def _start(self, indices: tuple[int, ...], work: Coroutine[Any, Any, None]) -> None:
        """Start an asyncio task that runs `work`, which samples the siblings `indices`."""
        task = asyncio.create_task(work)
        self._tasks |= dict.fromkeys(indices, task)
        self._held |= {index for index in indices if index > 0}
        task.add_done_callback(lambda _: self._release(indices))

    def _release(self, indices: tuple[int, ...]) -> None:
        """Give back the slots that the ended siblings `indices` hold. The slots belong to
        `services.sibling_limit`, which limits how many siblings are sampled at the same time."""
        ended = self._held.intersection(indices)
        self._held -= ended
        self._services.sibling_limit.release(len(ended))

    def _resolve_answer(self, answer: Serve | Refuse | BreakOff | None) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)

    async def _send_answer(self, answer: Serve | Refuse | BreakOff | None) -> None:
        match answer:
            case Serve(index):
                result = self._results[index]
                self._draft.serve(result)
            case Refuse():
                index, result = 0, self._results[0]
            case BreakOff(reason):
                await self.wait_closed()  # from here on, a relayed lead sends nothing
                error = STOPPING if reason == EndReason.PROXY_STOPPED.value else internal_error()
                return await self._app.end_with_error(error)
            case None:
                return
        if (outage := result.outage) is not None:
            return await self._refuse(outage)
        assert result.reply is not None
        reply = with_app_id(result.reply, self._request, index)
        await pass_on(self._services.sampler.upstream, self._request, self._app, reply)

    def _end(self, reason: str | None) -> None:
        """Cancel the group's timers, release the slots of siblings that were never started, and
        pass the group's ledger record to `services.on_end`.

        `reason` is the reason why the group was aborted. It is None for a group that ended
        normally.
        """
        self._resolve_answer(None)
        for timer in self._timers:
            timer.cancel()
        if self._scoring is not None:
            self._scoring.cancel()
        sibling_limit = self._services.sibling_limit
        num_never_started = self._plan.num - max(1, len(self._tasks))
        sibling_limit.release(num_never_started)
        lead = self._results.get(0)
        is_answered = lead is not None and lead.answer is not None
        if is_answered and not any(result.is_busy for result in self._results.values()):
            sibling_limit.request_succeeded()
        try:
            record = self._record(reason)
        except Exception:  # isolates: the server must be sent the group's end in any case
            self._log.exception("request %s could not be recorded", self._request.id)
            record = self._draft.failed(EndReason.INTERNAL_ERROR.value, 500)
        self._services.on_end(self, record)

    def _record(self, reason: str | None) -> GroupRecord:
        if self._fallback_reply is not None:
            return self._draft.fell_back(*self._fallback_reply)
        if reason is not None and self._scheduler.app is not AppState.ANSWERED:
            return self._draft.failed(reason, _STATUS.get(reason, 500))
        return self._draft.scored(self._scored_siblings(reason))

    def _scored_siblings(self, abort_reason: str | None) -> ScoredSiblings:
        num_answered = sum(result.answer is not None for result in self._results.values())
        outcome = self._outcome or RewardOutcome(
            None, EndReason.NO_GROUP.value if num_answered else EndReason.NO_ANSWER.value
        )
        return ScoredSiblings(
            results=[
                self._results.get(index, SiblingResult(index)) for index in sorted(self._tasks)
            ],
            rewards=self._scheduler.rewards,
            annotations=self._annotations,
            reason=abort_reason or outcome.reason,
            hook_hash=outcome.hook_hash or None,
            selection=self._scheduler.selection,
            policy=self._context.rules.policy,
            is_dropped=abort_reason is not None,
        )
