"""A group on its way into the ledger: what is known when the request arrives, and what it
became."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from fakevllm.admission.rules import ServeOnly
from fakevllm.groups.resend_cache import ResendEntry, missed
from fakevllm.groups.selection import Selection, failure_of, is_broken_off
from fakevllm.ledger.records import GroupRecord, KeptAnswer, SiblingRecord
from fakevllm.sessions.types import Place
from fakevllm.sessions.visit import Visit
from fakevllm.transport.app_response import AppReply
from fakevllm.transport.request import Request, SiblingResult, read_answer
from fakevllm.transport.retry import why_failed
from fakevllm_adapters.formats.base import Answer, Json
from fakevllm_adapters.protocol.reasons import OutageReason
from fakevllm_adapters.protocol.swarm import Task

if TYPE_CHECKING:
    from fakevllm.transport.engine_client import Reply

NOT_SHOWN = "not_told_in_the_apps_format"
"""An answer was there, and no way to say it: a call that was cut off, in Messages."""


@dataclass(frozen=True, slots=True)
class ScoredSiblings:
    """A sampled group with what the hook made of it."""

    results: list[SiblingResult]
    rewards: Mapping[int, float | None]
    annotations: Mapping[int, Mapping[str, Any]]
    reason: str | None
    """Why there are no rewards, or why they count for nothing."""
    hook_hash: str | None
    verdict: Selection
    policy: str
    """By which the served one was chosen."""
    is_dropped: bool = False
    """It will not be trained, whatever its rewards."""


@dataclass(slots=True)
class GroupDraft:
    """Made when a request arrives; each ending gives the record of it."""

    request: Request
    task: Task
    question: str
    """The text of the last user message."""
    app_key: str | None
    """Fingerprint of the app's key."""
    num_siblings: int = 1
    cut: str | None = None
    """Why there are fewer than asked for."""
    visit: Visit | None = None
    """In the tree of conversations."""
    attempt: ResendEntry | None = None
    """To get it answered, where it may be sent again."""
    app: AppReply | None = None
    is_answered_well: bool = False
    """What the app is given is a model's answer."""
    on_given: Callable[[str, str | None, str | None, Place | None], None] | None = None
    """Told of the group, the answer's id as the app reads it, the app's key and the place, before
    the app may say something of it."""
    answer_id: str | None = None
    received_at: float = field(default_factory=time.time)
    _started: float = field(default_factory=time.monotonic)
    _answered: float | None = None

    def is_answered(self) -> None:
        """Now; what the group still does is no time of the app's."""
        self._answered = self._answered or time.monotonic()

    def place(self) -> Place | None:
        """Where the request stands in its session. As soon as anybody wants to know; at the latest
        for the record, when the app has its answer."""
        if self.visit is None:
            return None
        ruling = self.request.ruling
        is_side = isinstance(ruling, ServeOnly) and ruling.is_side_call
        return self.visit.place(is_side=is_side)

    def begins(self, engines_id: str | None) -> None:
        """The app reads an answer that still comes: it may say something of it already."""
        name = self.request.response_id or engines_id
        if name is not None and self.answer_id is None:
            self._given(name)

    def _given(self, name: str | None) -> None:
        self.answer_id = name
        if self.on_given is not None:
            self.on_given(self.request.id, name, self.app_key, self.place())

    def gets(self, result: SiblingResult) -> None:
        """The app is given this sibling's answer: what it asks next may hold it. To be called
        before the answer's last byte leaves, where the group ends later than that."""
        self.place()  # before who asks next
        self.is_answered_well = result.answer is not None
        if result.answer is not None and self.answer_id is None:
            self._given(result.answer_id(self.request))
        if self.visit is None or result.answer is None:
            return
        if not self._is_cut:
            self._placed(self.visit, result.answer)
        elif self.attempt is not None:  # nobody's, until it is sent again
            self.attempt.pending.on_told = partial(self._placed, self.visit, result.answer)

    def _placed(self, visit: Visit, answer: Answer) -> None:
        visit.served(answer.message, time.time(), self.request.response_id)

    def failed(self, reason: str, status: int) -> GroupRecord:
        return self._record("failed", reason, status, [])

    def fell_back(self, reply: Reply, reason: OutageReason) -> GroupRecord:
        """The fallback's reply, and why it was asked: told also where it was no answer."""
        why = f"fallback: {reason}"
        return self.served_once(reply, why, of_failed=f"{why}: ")

    def served_once(self, reply: Reply, reason: str, of_failed: str = "") -> GroupRecord:
        """`of_failed`: how the reason begins where it was no answer."""
        is_read = self.request.exchange is not None
        answer = read_answer(self.request, reply) if is_read else None
        result = SiblingResult(0, reply, answer)
        if answer is not None and not self.request.can_show(result):
            rows = [_sibling(result, None, {})]
            return self._record("failed", of_failed + NOT_SHOWN, 500, rows)
        is_served = answer is not None or (reply.status == 200 and not is_read)
        sibling = _sibling(result, None, {}, served=is_served)
        if not is_served:
            reason = "no_answer" if reply.status == 200 else f"upstream_{reply.status}"
            reason = of_failed + reason
        state, served = ("served", 0) if is_served else ("failed", None)
        if is_served:
            self.gets(result)
        return self._record(state, reason, reply.status, [sibling], served=served)

    def scored(self, scored: ScoredSiblings) -> GroupRecord:
        verdict = scored.verdict
        rows = [
            _sibling(
                result,
                scored.rewards.get(result.index),
                scored.annotations.get(result.index, {}),
                served=result.index == verdict.served,
                best=result.index == verdict.best,
                failure=_failure(result, self.request.body),
            )
            for result in scored.results
        ]
        num_rewards = sum(reward is not None for reward in scored.rewards.values())
        state, reason = "scored", None
        if verdict.served is None:
            state, reason = "failed", _why_not_served(scored.results[0])
        elif num_rewards < 2 or scored.is_dropped:
            state, reason = "dropped", scored.reason or "fewer_than_two_rewards"
        for result in scored.results:
            if result.index == verdict.served:
                self.gets(result)
        record = self._record(
            state, reason, self._status(scored), rows, verdict.served, verdict.best
        )
        how = "random" if verdict.is_random else scored.policy
        return replace(
            record,
            hook_hash=scored.hook_hash,
            served_by=None if verdict.served is None else how,
            propensity=verdict.propensity,
        )

    def _status(self, scored: ScoredSiblings) -> int:
        """As the app saw it."""
        shown = scored.results[scored.verdict.served or 0]
        is_lost = shown.answer is not None and not self.request.can_show(shown)
        return 500 if is_lost else shown.status

    @property
    def _is_cut(self) -> bool:
        is_told = self.attempt is not None and self.attempt.num_told > 0
        return self.app is not None and self.app.was_cut and not is_told

    def _kept(self) -> KeptAnswer | None:
        if self.attempt is None or self.app is None or not self.is_answered_well:
            return None
        return missed(self.attempt, self.app, time.time())

    def _record(
        self,
        state: str,
        reason: str | None,
        status: int,
        siblings: list[SiblingRecord],
        served: int | None = None,
        best: int | None = None,
    ) -> GroupRecord:
        request, place = self.request, self.place()
        if self.visit is not None:
            self.visit.failed(time.time())  # where it was not served
        return GroupRecord(
            group_id=request.id,
            received_at=self.received_at,
            route=request.adapter.path,
            model=str(request.body.get("model") or ""),
            response_id=request.response_id,
            streamed=request.streamed,
            task_id=self.task.task_id or None,
            app_key=self.app_key,
            request_json=request.raw.decode(errors="replace"),
            question=self.question,
            num_siblings=self.num_siblings,
            status=499 if status == 200 and self._is_cut else status,
            latency_s=(self._answered or time.monotonic()) - self._started,
            served_index=served,
            best_index=best,
            state=state,
            reason=reason,
            hook_hash=None,
            siblings=siblings,
            cut=self.cut,
            answer_id=self.answer_id,
            num_resent=0 if self.attempt is None else self.attempt.pending.num_resent,
            kept=self._kept(),
            **_columns(place),
        )


def _columns(place: Place | None) -> dict[str, Any]:
    if place is None:
        return {}
    return {
        "session_id": place.session_id,
        "parent_session_id": place.parent_session_id,
        "parent_id": place.parent_id,
        "turn": place.turn,
        "kind": place.kind.value,
        "evidence": place.evidence.value,
        "asked_key": place.asked_key or None,
    }


def _sibling(
    result: SiblingResult,
    reward: float | None,
    annotations: Mapping[str, Any],
    *,
    served: bool = False,
    best: bool = False,
    failure: str | None = None,
) -> SiblingRecord:
    answer = result.answer or Answer({}, None)
    tool_calls = answer.message.get("tool_calls")
    return SiblingRecord(
        index=result.index,
        served=served,
        best=best,
        status=result.status,
        message_json=orjson.dumps(answer.message).decode() if result.answer else None,
        text=answer.text if result.answer else None,
        tool_calls_json=orjson.dumps(tool_calls).decode() if tool_calls else None,
        finish_reason=answer.finish_reason,
        prompt_tokens=answer.usage.get("prompt_tokens"),
        completion_tokens=answer.usage.get("completion_tokens"),
        reward=reward,
        annotations_json=orjson.dumps(dict(annotations)).decode() if annotations else None,
        error=None if result.answer else _trouble(result),
        failure=failure,
    )


def _failure(result: SiblingResult, body: Json) -> str | None:
    """None also where there is no answer at all: `error` says why."""
    if result.answer is None:
        return None
    return "broken_off" if is_broken_off(result.answer) else failure_of(result.answer, body)


def _why_not_served(lead: SiblingResult) -> str:
    if lead.answer is not None:
        return NOT_SHOWN
    if lead.error is not None:
        return why_failed(lead.error)
    is_refused = lead.reply is not None and lead.status >= 400
    return f"upstream_{lead.status}" if is_refused else "no_answer"


def _trouble(result: SiblingResult) -> str:
    if result.error is not None:
        return result.error.message
    return (
        result.reply.body[:500].decode(errors="replace")
        if result.reply is not None
        else "cancelled"
    )
