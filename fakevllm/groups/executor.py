"""One request with several siblings, executed: the async shell of `fanout.py`.

The request's own task waits for the app's answer and gives it; siblings, scoring and the relayed
lead are tasks beside it, and may outlive it. Whatever ends tells the machine, and what it decides
is done at once: nothing here decides.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fakevllm.admission.rules import is_shadow
from fakevllm.config.serving import ServeRules
from fakevllm.groups import scheduler
from fakevllm.groups.record import GroupDraft, ScoredSiblings
from fakevllm.groups.sampler import Sampler
from fakevllm.groups.scheduler import AppState, BreakOff, Decision, GroupScheduler, Refuse, Serve
from fakevllm.groups.scoring import score
from fakevllm.hooks.results import RewardOutcome
from fakevllm.hooks.worker import HookWorker
from fakevllm.ledger.records import GroupRecord
from fakevllm.transport.app_response import AppReply
from fakevllm.transport.engine_client import Reply
from fakevllm.transport.relay import pass_on
from fakevllm.transport.request import (
    Plan,
    Request,
    SiblingResult,
    came_of,
    read_answer,
    with_apps_id,
)
from fakevllm.transport.sibling_limit import Room
from fakevllm_adapters.http.asgi import Receive, wait_for_disconnect
from fakevllm_adapters.protocol.errors import WireError, internal_error, unavailable
from fakevllm_adapters.protocol.reasons import OutageReason

log = logging.getLogger("fakevllm.groups.pipeline")

LINGER_S = 0.25
"""How long an answer may still come to its end after its app has left: some clients hang up at the
event that ends an answer, before its last byte."""
STOPPING = unavailable("The proxy is stopping. Try again shortly.")

_STATUS = {"client_disconnected": 499, "proxy_stopped": 503, "upstream_unreachable": 503}
"""What the app would have seen; else 500."""


@dataclass(frozen=True, slots=True)
class GroupServices:
    """What every group is run with."""

    asking: Sampler
    hooks: HookWorker
    room: Room
    chance: random.Random
    end: Callable[[GroupExecutor, GroupRecord], None]
    """Takes each group's record, once."""
    failure_floor: float | None = None


class GroupExecutor:
    """`plan.num - 1` places of the room are its own from the start."""

    def __init__(
        self,
        means: GroupServices,
        request: Request,
        draft: GroupDraft,
        plan: Plan,
        rules: ServeRules,
        app: AppReply,
    ) -> None:
        self._means = means
        self._request = request
        self._log = logging.LoggerAdapter(log, {"group": request.id})
        self._draft = draft
        self._plan = plan
        self._rules = rules
        self._app = app
        comes_live = request.streamed or is_shadow(request.ruling)
        self._fanout = GroupScheduler(plan.num, rules, means.chance, comes_live=comes_live)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._scoring: asyncio.Task[None] | None = None
        self._results: dict[int, SiblingResult] = {}
        self._outcome: RewardOutcome | None = None
        self._annotations: dict[int, dict[str, Any]] = {}
        loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Serve | Refuse | BreakOff | None] = loop.create_future()
        """How the app is answered; None: it has been, or is not there."""
        self._fell_back: tuple[Reply, OutageReason] | None = None
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def has_overrides(self) -> bool:
        return bool(self._plan.overrides)

    async def answer(self, receive: Receive) -> None:
        """Returns once the app has its answer, or is to have none; the rest goes on by itself."""
        watch = asyncio.create_task(wait_for_disconnect(receive))
        watch.add_done_callback(self._on_left)
        try:
            self._begin()
            await self._tell_app(await self._answer)
        except asyncio.CancelledError:
            # Only a stop of the proxy cancels a request; its app is told so, and the task ends.
            self.stop()
            await self.closed()
            await self._app.break_off(STOPPING)
        except WireError as error:
            await self._app.refuse(error)
            self._do(self._fanout.give_up("upstream_unreachable"))
        except Exception:  # isolates: a defect of ours must not leave the app without an answer
            self._log.exception("request %s failed", self._request.id)
            self._do(self._fanout.give_up("internal_error"))
            await self._app.break_off(internal_error())
        finally:
            watch.remove_done_callback(self._on_left)
            watch.cancel()
        self._draft.is_answered()
        self._do(self._fanout.answer_ended())

    def stop(self) -> None:
        self._do(self._fanout.give_up("proxy_stopped"))

    def pass_deadline(self) -> None:
        self._do(self._fanout.deadline_passed())

    async def closed(self) -> None:
        """Until nothing is under way that was started or cancelled."""
        tasks = [task for task in [*self._tasks.values(), self._scoring] if task is not None]
        if tasks:
            await asyncio.wait(tasks)

    # --- events

    def _begin(self) -> None:
        deadline_s = self._rules.deadline_s
        if deadline_s is not None:
            self._later(deadline_s, self.pass_deadline)
        self._do(self._fanout.begin())

    def _on_left(self, watch: asyncio.Task[None]) -> None:
        if watch.cancelled():
            return
        linger_s = LINGER_S if self._fanout.app is AppState.RELAYED else 0.0
        self._later(linger_s, self._leave)

    def _leave(self) -> None:
        self._do(self._fanout.app_left())

    def _later(self, delay_s: float, tell: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, tell))

    async def _run(self, index: int, *, is_relayed: bool) -> None:
        asking = self._means.asking
        try:
            if is_relayed:
                result = await self._relay()
            else:
                result = await asking.sample(self._request, self._plan, index, self._app)
            came = came_of(self._request, result)
        except Exception:  # isolates: a defect of ours must not leave the app without an answer
            self._log.exception("sibling %d of request %s failed", index, self._request.id)
            return self._do(self._fanout.give_up("internal_error"))
        self._results[index] = result
        if is_relayed:
            self._draft.is_answered()
            # Not given up with its app. That may have left all the same, where the rule is to
            # `finish`: who asks again gets the answer then.
            if self._fanout.app is AppState.RELAYED:
                self._draft.gets(result)
            self._tell(None)
        self._do(self._fanout.finished(index, came))

    async def _relay(self) -> SiblingResult:
        """The lead, whose answer the app gets as it comes."""
        try:
            reply = await self._means.asking.relay(
                self._request, self._plan, self._app, lambda: self._do(self._fanout.lead_began())
            )
        except WireError as error:
            await self._refuse(error)
            return SiblingResult(0, error=error)
        return SiblingResult(0, reply, read_answer(self._request, reply))

    async def _refuse(self, error: WireError) -> None:
        """The fallback may have an answer yet; it is no sibling."""
        try:
            self._fell_back = await self._means.asking.lifeline.fall_back(
                self._request, self._app, error
            )
            self._draft.is_answered_well = True
        except WireError as told:
            await self._app.refuse(told)

    async def _score(self, indices: tuple[int, ...]) -> None:
        results = [self._results[index] for index in indices]
        try:
            means = self._means
            outcome = await score(means.hooks, self._draft, results, means.failure_floor)
        except Exception:  # isolates, as above
            self._log.exception("request %s could not be scored", self._request.id)
            return self._do(self._fanout.give_up("internal_error"))
        self._scoring = None
        self._outcome = outcome
        rewards = outcome.rewards or [None] * len(indices)
        self._annotations = dict(zip(indices, outcome.annotations, strict=False))
        self._do(self._fanout.scored(dict(zip(indices, rewards, strict=True))))

    # --- decisions

    def _do(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case scheduler.Relay():
                    self._start(0, is_relayed=True)
                case scheduler.Start(indices):
                    for index in indices:
                        self._start(index)
                case scheduler.Cancel(indices):
                    for index in indices:
                        self._tasks[index].cancel()
                case scheduler.Score(indices):
                    self._scoring = asyncio.create_task(self._score(indices))
                case scheduler.Settle():
                    self._end(None)
                case scheduler.Abort(reason):
                    self._end(reason)
                case Serve() | Refuse() | BreakOff():
                    self._tell(decision)

    def _start(self, index: int, *, is_relayed: bool = False) -> None:
        task = asyncio.create_task(self._run(index, is_relayed=is_relayed))
        self._tasks[index] = task
        if index > 0:
            task.add_done_callback(lambda _: self._means.room.leave())

    def _tell(self, answer: Serve | Refuse | BreakOff | None) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)

    async def _tell_app(self, answer: Serve | Refuse | BreakOff | None) -> None:
        match answer:
            case Serve(index):
                shown = self._results[index]
                self._draft.gets(shown)
            case Refuse():
                index, shown = 0, self._results[0]
            case BreakOff(reason):
                await self.closed()  # a relayed lead writes no more
                error = STOPPING if reason == "proxy_stopped" else internal_error()
                return await self._app.break_off(error)
            case None:
                return
        if (outage := shown.outage) is not None:
            return await self._refuse(outage)
        assert shown.reply is not None
        reply = with_apps_id(shown.reply, self._request, index)
        await pass_on(self._means.asking.upstream, self._request, self._app, reply)

    def _end(self, reason: str | None) -> None:
        """Gives back what it took, and its record away."""
        self._tell(None)
        for timer in self._timers:
            timer.cancel()
        if self._scoring is not None:
            self._scoring.cancel()
        means = self._means
        means.room.leave(self._plan.num - max(1, len(self._tasks)))  # those that never started
        lead = self._results.get(0)
        is_answered = lead is not None and lead.answer is not None
        if is_answered and not any(result.is_too_much for result in self._results.values()):
            means.room.went_well()
        try:
            record = self._record(reason)
        except Exception:  # isolates: the server must hear of the group's end, come what may
            self._log.exception("request %s could not be recorded", self._request.id)
            record = self._draft.failed("internal_error", 500)
        means.end(self, record)

    def _record(self, reason: str | None) -> GroupRecord:
        """`reason`: why the group is given up, if it is."""
        if self._fell_back is not None:
            return self._draft.fell_back(*self._fell_back)
        if reason is not None and self._fanout.app is not AppState.ANSWERED:
            return self._draft.failed(reason, _STATUS.get(reason, 500))
        return self._draft.scored(self._scored(reason))

    def _scored(self, dropped: str | None) -> ScoredSiblings:
        num_answered = sum(result.answer is not None for result in self._results.values())
        outcome = self._outcome or RewardOutcome(None, "no_group" if num_answered else "no_answer")
        return ScoredSiblings(
            [self._results.get(index, SiblingResult(index)) for index in sorted(self._tasks)],
            self._fanout.rewards,
            self._annotations,
            dropped or outcome.reason,
            outcome.hook_hash or None,
            self._fanout.verdict,
            self._rules.policy,
            is_dropped=dropped is not None,
        )
