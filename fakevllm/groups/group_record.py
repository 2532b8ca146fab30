"""The draft of the ledger record for one group (a request with its siblings, the answers that are
sampled for it). The draft collects data from the arrival of the request until the group's end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from fakevllm.admission.admission_rules import ServeOnly
from fakevllm.groups.resend_cache import ResendEntry, undelivered_answer
from fakevllm.groups.sibling_selection import Selection, failure_of, is_broken_off
from fakevllm.hooks.results import RewardOutcome
from fakevllm.ledger.reasons import EndReason
from fakevllm.ledger.records import EVAL_KIND, GroupRecord, KeptAnswer, SiblingRecord
from fakevllm.release.arms import ARM_UNAVAILABLE, OTHER_ARM
from fakevllm.sessions.request_placement import Placement
from fakevllm.sessions.types import Place
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.request import Request, SiblingResult, end_traced_call, read_answer
from fakevllm.transport.request_arm import RequestArm
from fakevllm.transport.retry_handler import failure_reason
from fakevllm_adapters.formats.base import Answer, Json
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.protocol.swarm import Task

if TYPE_CHECKING:
    from fakevllm.transport.engine_client import EngineResponse

REDACTED = "redacted"
"""Reason for not training a request that has text that is redacted, or whose answer has such text.
A further reason may follow after a colon."""
NOT_SHOWN = "not_told_in_the_apps_format"
"""Reason for an error: the answer cannot be translated into the app's API format. An example is a
tool call that was cut off, if the app uses Anthropic's Messages API."""


@dataclass(frozen=True, slots=True)
class ScoredSiblings:
    """The siblings of a group after scoring. A sibling is an answer that was sampled for the
    group's request. The object also has the result of the reward hook, and the choice of the
    sibling that is served to the app."""

    results: list[SiblingResult]
    rewards: Mapping[int, float | None]
    """Rewards by sibling index."""
    annotations: Mapping[int, Mapping[str, Any]]
    """The hook's annotations by sibling index."""
    reason: str | None
    """Slug of the reason why there are no rewards or why the group is dropped; else None."""
    hook_hash: str | None
    selection: Selection
    policy: str
    """The serve policy that chose the served sibling."""
    is_dropped: bool = False
    """True if the group will not be trained, whatever its rewards are."""


@dataclass(slots=True)
class GroupDraft:
    """The data about a request that are collected until its ledger record is complete.

    An app's request can end in four ways. For each way, one method returns the ledger record:

    * `failed`: the app got an error.
    * `served_once`: the request was sampled once.
    * `fell_back`: the fallback server answered the request.
    * `scored`: the request was sampled several times.

    For a dataset row that was sampled for an evaluation, `evaluated` returns the ledger record.
    """

    request: Request
    task: Task
    question: str
    """The text of the last user message."""
    app_key: str | None
    """Fingerprint of the app's API key."""
    num_siblings: int = 1
    cut_reason: str | None = None
    """Slug of the reason why fewer answers are sampled than planned; None if all planned answers
    are sampled."""
    placement: Placement | None = None
    """Object that finds the request's place in its session (conversation)."""
    attempt: ResendEntry | None = None
    """The request's entry in the cache that answers retries of a request. None if retries of this
    request are not recognised."""
    app: AppResponse | None = None
    """The response to the app. This field is set after the draft was created, because the
    constructor of AppResponse takes the draft's method `stream_began`."""
    is_answered_well: bool = False
    """Whether the app gets an answer of a model, not an error."""
    on_answer_id: Callable[[str, str | None, str | None, Place | None], None] | None = None
    """Callback that is called as soon as the answer's id is known, before the app can send feedback
    on the answer. Its arguments are the group's id, the answer's id as the app reads it, the
    fingerprint of the app's key, and the request's place in its session."""
    answer_id: str | None = None
    received_at: float = field(default_factory=time.time)
    """Time at which the request arrived, in Unix seconds."""
    _started: float = field(default_factory=time.monotonic)
    _answered: float | None = None

    def mark_answered(self) -> None:
        """Record that the app has its answer. This stops the clock that measures the request's
        latency. Only the first call of this method has an effect."""
        self._answered = self._answered or time.monotonic()
        if self.request.trace is not None:
            self.request.trace.mark_answered()

    def place(self) -> Place | None:
        """Return the request's place, or None if the place is unknown. The place is the request's
        session (a conversation of the app) and the position in the session.

        The first call of this method determines the place, and later calls return the same place.
        """
        if self.placement is None:
            return None
        ruling = self.request.ruling
        is_side = isinstance(ruling, ServeOnly) and ruling.is_side_call
        return self.placement.place(is_side=is_side)

    def stream_began(self, engine_id: str | None) -> None:
        """Record the id of a streamed answer, and pass it to the callback `on_answer_id`.

        Call this method when the first part of a stream has been sent. From then on, the app knows
        the answer's id and can send feedback on the answer. `engine_id` is the id that the engine
        gave the answer.
        """
        answer_id = self.request.response_id or engine_id
        if answer_id is not None and self.answer_id is None:
            self._announce_answer(answer_id)

    def _announce_answer(self, answer_id: str | None) -> None:
        self.answer_id = answer_id
        if self.on_answer_id is not None:
            self.on_answer_id(self.request.id, answer_id, self.app_key, self.place())

    def serve(self, result: SiblingResult) -> None:
        """Record that the app gets the answer of this sibling (one of the request's sampled
        answers).

        The app's next request usually contains this answer in its history. The proxy uses the
        answer to find the session (conversation) of the next request. The app may send the next
        request right after the last byte of this answer. Therefore, call this method before the
        last byte is sent.
        """
        self.place()  # before the place of the app's next request is computed
        self.is_answered_well = result.answer is not None
        if result.answer is not None and self.answer_id is None:
            self._announce_answer(result.answer_id(self.request))
        if self.placement is None or result.answer is None:
            return
        if not self._is_cut:
            self._add_to_session(self.placement, result.answer)
        elif self.attempt is not None:
            # Nobody has the answer until the request is sent again. The callback is assigned here,
            # after construction, because only now the answer is known.
            self.attempt.pending.on_delivery = partial(
                self._add_to_session, self.placement, result.answer
            )

    def _add_to_session(self, placement: Placement, answer: Answer) -> None:
        placement.served(answer.message, time.monotonic(), self.request.response_id)

    def failed(self, reason: str, status: int) -> GroupRecord:
        """Return the ledger record of a request that got an error in place of an answer."""
        return self._record("failed", reason, status, [])

    def fell_back(self, reply: EngineResponse, outage: OutageReason) -> GroupRecord:
        """Return the ledger record of a request that was sent to the fallback server.

        `outage` is the reason why the fallback server was used. The record's column `reason` begins
        with `fallback: ` and this reason, even if the fallback server returned an error.
        """
        reason = f"fallback: {outage}"
        record = self._served_once(self._single(reply), reason, failure_prefix=f"{reason}: ")
        return replace(record, arm=None, arm_propensity=None)  # no arm's weights have answered

    def served_once(self, reply: EngineResponse, reason: str) -> GroupRecord:
        """Return the ledger record of a request that was sampled only once.

        `reason` is the slug of the reason for sampling only once. If the app gets an answer, this
        slug is stored in the record's column `reason`. If the app gets an error, the slug of the
        error's cause is stored in this column.
        """
        result = self._single(reply)
        end_traced_call(self.request, result)
        return self._served_once(result, reason)

    def _single(self, reply: EngineResponse) -> SiblingResult:
        """Return the only answer of a request that is not trained."""
        is_read = self.request.exchange is not None
        return SiblingResult(0, reply, read_answer(self.request, reply) if is_read else None)

    def _served_once(
        self, result: SiblingResult, reason: str, failure_prefix: str = ""
    ) -> GroupRecord:
        """Return the ledger record of a request with one answer. `failure_prefix` is put in front
        of the cause of an error."""
        reply, answer = result.reply, result.answer
        assert reply is not None, "without a reply, the request has failed"
        is_read = self.request.exchange is not None
        if answer is not None and not self.request.can_show(result):
            rows = [_sibling(result, None, {})]
            return self._record("failed", failure_prefix + NOT_SHOWN, 500, rows)
        is_served = answer is not None or (reply.status == 200 and not is_read)
        sibling = _sibling(result, None, {}, served=is_served)
        if not is_served:
            reason = (
                EndReason.NO_ANSWER.value if reply.status == 200 else f"upstream_{reply.status}"
            )
            reason = failure_prefix + reason
        state, served = ("served", 0) if is_served else ("failed", None)
        if is_served:
            self.serve(result)
        return self._record(state, reason, reply.status, [sibling], served=served)

    def scored(self, scored: ScoredSiblings) -> GroupRecord:
        """Return the ledger record of a request that was sampled several times. Call this method
        after all siblings (the sampled answers) have ended."""
        selection = scored.selection
        rows = [
            _sibling(
                result,
                scored.rewards.get(result.index),
                scored.annotations.get(result.index, {}),
                served=result.index == selection.served,
                best=result.index == selection.best,
                failure=_failure(result, self.request.body),
            )
            for result in scored.results
        ]
        num_rewards = sum(reward is not None for reward in scored.rewards.values())
        state, reason = "scored", None
        if selection.served is None:
            state, reason = "failed", failure_reason_of(scored.results[0])
        elif num_rewards < 2 or scored.is_dropped:
            state, reason = "dropped", scored.reason or EndReason.FEWER_THAN_TWO_REWARDS.value
        for result in scored.results:
            if result.index == selection.served:
                self.serve(result)
        if state != "failed" and not self.request.is_captured:
            state, reason = "served", self._uncaptured_reason(reason)
        record = self._record(
            state, reason, self._status(scored), rows, selection.served, selection.best
        )
        served_by = "random" if selection.is_random else scored.policy
        return replace(
            record,
            hook_hash=scored.hook_hash,
            served_by=None if selection.served is None else served_by,
            propensity=selection.propensity,
        )

    def _uncaptured_reason(self, reason: str | None) -> str:
        """Return the reason that the ledger records for a group whose calls the server has not
        captured."""
        arm = self.request.arm
        is_other_arm = arm is not None and not arm.is_training
        if not is_other_arm:
            return REDACTED if reason is None else f"{REDACTED}: {reason}"
        return self._other_arm_reason(reason)

    def _other_arm_reason(self, reason: str | None) -> str:
        """Return the reason that the ledger records for a group outside the training arm (the
        sessions that the newest weights answer). Such a group is not trained. `reason` is a further
        reason for this, such as too few rewards, or None.

        The result is a slug, in some cases followed by a detail. If the weights for the session
        were not available, the detail is the cause. Otherwise the detail is `reason`.
        """
        arm = self.request.arm
        slug, detail = OTHER_ARM, reason
        if arm is not None and arm.trouble is not None:
            slug, detail = ARM_UNAVAILABLE, arm.trouble
        return slug if detail is None else f"{slug}: {detail}"

    def evaluated(
        self,
        results: Sequence[SiblingResult],
        answered: Sequence[SiblingResult],
        outcome: RewardOutcome,
        eval_id: str,
        version: int | None,
    ) -> GroupRecord:
        """Return the ledger record of a dataset row that was sampled for an evaluation.

        `results` has all samples. `answered` has the samples with an answer, in the order of the
        rewards of `outcome`. `version` is the version of the weights, or None if it is unknown.
        """
        rewards = dict(zip((one.index for one in answered), outcome.rewards or (), strict=False))
        annotations = dict(zip((one.index for one in answered), outcome.annotations, strict=False))
        rows = [
            _sibling(
                result,
                rewards.get(result.index),
                annotations.get(result.index, {}),
                failure=_failure(result, self.request.body),
            )
            for result in results
        ]
        if answered:
            state, reason, status = "served", outcome.reason or EndReason.EVALUATION.value, 200
        else:
            state, reason, status = "failed", outcome.reason, results[0].status
        record = self._record(state, reason, status, rows)
        return replace(
            record,
            kind=EVAL_KIND,
            hook_hash=outcome.hook_hash or None,
            eval_id=eval_id,
            eval_version=version,
        )

    def _status(self, scored: ScoredSiblings) -> int:
        """Return the HTTP status of the response that the app got for this group."""
        result = scored.results[scored.selection.served or 0]
        is_lost = result.answer is not None and not self.request.can_show(result)
        return 500 if is_lost else result.status

    @property
    def _is_cut(self) -> bool:
        """Return True if the app disconnected before it had the whole answer, and no retry of the
        request has got the answer since."""
        is_delivered = self.attempt is not None and self.attempt.num_delivered > 0
        return self.app is not None and self.app.is_cut_short and not is_delivered

    def _kept_answer(self) -> KeptAnswer | None:
        if self.attempt is None or self.app is None or not self.is_answered_well:
            return None
        return undelivered_answer(self.attempt, self.app, time.time())

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
        if self.placement is not None:
            self.placement.failed(time.monotonic())  # no effect if it was served
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
            cut=self.cut_reason,
            answer_id=self.answer_id,
            num_resent=0 if self.attempt is None else self.attempt.pending.num_resent,
            kept_answer=self._kept_answer(),
            **_columns(place),
            **_arm_columns(request.arm),
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


def _arm_columns(arm: RequestArm | None) -> dict[str, Any]:
    if arm is None:
        return {}
    propensity = arm.propensity if arm.trouble is None else None
    return {"arm": arm.answering.value, "arm_propensity": propensity}


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
        error=None if result.answer else _error_text(result),
        failure=failure,
    )


def _failure(result: SiblingResult, body: Json) -> str | None:
    """Return the slug of the reason why a sibling (sampled answer) is not usable, such as
    `cut_off`. Return None if the answer is usable, or if there is no answer. (Without an answer,
    the cause is in the record's field `error`.)"""
    if result.answer is None:
        return None
    return "broken_off" if is_broken_off(result.answer) else failure_of(result.answer, body)


def failure_reason_of(lead: SiblingResult) -> str:
    """Return the reason why a request got no answer, as a slug. `lead` is the result of sampling
    the request's first answer (sibling 0)."""
    if lead.answer is not None:
        return NOT_SHOWN
    if lead.error is not None:
        return failure_reason(lead.error)
    is_refused = lead.reply is not None and lead.status >= 400
    return f"upstream_{lead.status}" if is_refused else EndReason.NO_ANSWER.value


def _error_text(result: SiblingResult) -> str:
    if result.error is not None:
        return result.error.message
    return (
        result.reply.body[:500].decode(errors="replace")
        if result.reply is not None
        else "cancelled"
    )
