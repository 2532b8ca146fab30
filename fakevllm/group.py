"""A group on its way into the ledger: what is known when the request arrives, and what it
became."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from fakevllm.ledger.records import GroupRecord, SiblingRecord
from fakevllm.siblings import Request, SiblingResult, read_answer
from fakevllm_adapters.base import Answer
from fakevllm_adapters.swarm import Task

if TYPE_CHECKING:
    from fakevllm.runner import Scored
    from fakevllm.upstream import Reply

NOT_SHOWN = "not_told_in_the_apps_format"
"""An answer was there, and no way to say it: a call that was cut off, in Messages."""


@dataclass(slots=True)
class GroupDraft:
    """Made when a request arrives; each ending gives the record of it."""

    request: Request
    task: Task
    app_key: str | None
    """Fingerprint of the app's key."""
    num_siblings: int = 1
    received_at: float = field(default_factory=time.time)
    _started: float = field(default_factory=time.monotonic)

    def failed(self, reason: str, status: int) -> GroupRecord:
        return self._record("failed", reason, status, [])

    def served_once(self, reply: Reply, reason: str) -> GroupRecord:
        is_read = self.request.exchange is not None
        answer = read_answer(self.request, reply) if is_read else None
        result = SiblingResult(0, reply, answer)
        if answer is not None and not self.request.can_show(result):
            return self._record("failed", NOT_SHOWN, 500, [_sibling(result, None, {})])
        is_served = answer is not None or (reply.status == 200 and not is_read)
        sibling = _sibling(result, None, {}, served=is_served)
        if not is_served:
            reason = "no_answer" if reply.status == 200 else f"upstream_{reply.status}"
        state, served = ("served", 0) if is_served else ("failed", None)
        return self._record(state, reason, reply.status, [sibling], served=served)

    def scored(self, scored: Scored) -> GroupRecord:
        verdict = scored.verdict
        rows = [
            _sibling(
                result,
                scored.rewards.get(result.index),
                scored.annotations.get(result.index, {}),
                served=result.index == verdict.served,
                best=result.index == verdict.best,
            )
            for result in scored.results
        ]
        num_rewards = sum(reward is not None for reward in scored.rewards.values())
        state, reason = "scored", None
        if verdict.served is None:
            lead = scored.results[0]
            is_refused = lead.reply is not None and lead.status >= 400
            state, reason = "failed", f"upstream_{lead.status}" if is_refused else "no_answer"
        elif num_rewards < 2:
            state, reason = "dropped", scored.reason or "fewer_than_two_rewards"
        shown = scored.results[verdict.served or 0]
        is_lost = shown.answer is not None and not self.request.can_show(shown)
        status = 500 if is_lost else shown.status
        return self._record(
            state, reason, status, rows, verdict.served, verdict.best, scored.hook_hash
        )

    def _record(
        self,
        state: str,
        reason: str | None,
        status: int,
        siblings: list[SiblingRecord],
        served: int | None = None,
        best: int | None = None,
        hook_hash: str | None = None,
    ) -> GroupRecord:
        request = self.request
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
            question=request.adapter.question(request.body),
            num_siblings=self.num_siblings,
            status=status,
            latency_s=time.monotonic() - self._started,
            served_index=served,
            best_index=best,
            state=state,
            reason=reason,
            hook_hash=hook_hash,
            siblings=siblings,
        )


def _sibling(
    result: SiblingResult,
    reward: float | None,
    annotations: Mapping[str, Any],
    *,
    served: bool = False,
    best: bool = False,
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
    )


def _trouble(result: SiblingResult) -> str:
    if result.error is not None:
        return result.error.message
    return (
        result.reply.body[:500].decode(errors="replace")
        if result.reply is not None
        else "cancelled"
    )
