"""A captured call as a row, and back. Exact: what is read is what was written, bit by bit."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Connection

from fakevllm_server.episodes.registry import ID_CHARS
from fakevllm_server.journal.tables import GroupState
from fakevllm_server.types.calls import RecordedCall, VersionSpan
from fakevllm_server.types.token_masks import TokenMasks

CALL_COLUMNS = "prompt_ids, response_ids, logprobs, facts_json, digest"
CallRow = tuple[bytes, bytes, bytes | None, str, bytes]


class CorruptCall(Exception):
    """A row is not what was written."""


def call_row(call: RecordedCall) -> CallRow:
    """The values of CALL_COLUMNS."""
    logprobs = None if call.logprobs is None else array("d", call.logprobs).tobytes()
    facts = orjson.dumps(
        {
            "versions": [[span.version, span.start, span.end] for span in call.versions],
            "temperature": call.temperature,
            "finish_reason": call.finish_reason,
            "untrainable": call.untrainable,
            "allowed": None if call.allowed is None else call.allowed.to_wire(),
        }
    ).decode()
    parts = (
        array("i", call.prompt_ids).tobytes(),
        array("i", call.response_ids).tobytes(),
        logprobs,
        facts,
    )
    return (*parts, _digest(*parts))


def call_of(row: CallRow) -> RecordedCall:
    """Raises CorruptCall."""
    prompt_ids, response_ids, logprobs, facts_json, digest = row
    if _digest(prompt_ids, response_ids, logprobs, facts_json) != digest:
        raise CorruptCall
    facts: dict[str, Any] = orjson.loads(facts_json)
    allowed = facts["allowed"]
    return RecordedCall(
        prompt_ids=array("i", prompt_ids).tolist(),
        response_ids=array("i", response_ids).tolist(),
        logprobs=None if logprobs is None else array("d", logprobs).tolist(),
        versions=[VersionSpan(*span) for span in facts["versions"]],
        temperature=facts["temperature"],
        finish_reason=facts["finish_reason"],
        untrainable=facts["untrainable"],
        allowed=None if allowed is None else TokenMasks.from_wire(allowed),
    )


def _digest(*parts: bytes | str | None) -> bytes:
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part or b""
        size = -1 if part is None else len(raw)
        hashed.update(size.to_bytes(8, "little", signed=True) + raw)
    return hashed.digest()


# What the journal holds, as values: what changes are made of, and what reading finds.

PRUNED = "pruned_to_step"
"""Key of the last step whose calls are not kept any more."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that takes effect once, and what it was answered."""

    key: str
    body_hash: bytes
    reply_json: str


@dataclass(frozen=True, slots=True)
class ScoredSample:
    owner: str
    index: int
    reward: float | None
    task_id: str | None = None


@dataclass(frozen=True, slots=True)
class PooledGroup:
    """A group that has ended: its state, and why it is not pooled where it is not."""

    group_id: str
    state: GroupState
    reason: str | None = None
    advantage: float | None = None


def pooled_or_dropped(
    group_id: str, reason: str | None, advantage: float | None = None
) -> PooledGroup:
    """Pooled, unless there is a reason why not."""
    state = GroupState.DROPPED if reason else GroupState.POOLED
    return PooledGroup(group_id, state, reason or None, advantage)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    step: int
    folder: str
    version: int
    digest: str
    reward_mean: float | None


def groups_hash(group_ids: Sequence[str]) -> str:
    """Of a batch's groups, in order."""
    return hashlib.sha256("\n".join(group_ids).encode()).hexdigest()


# Whose episodes wait to be trained: with them a next life asks who agrees to its step.


def clients_that_wait(db: Connection) -> list[str]:
    """Their uuids. Those that only aborted, and whose groups were all dropped, are not known."""
    ended_by = f"JOIN episodes e ON e.episode_id = substr(s.owner, 1, {ID_CHARS})"
    query = (
        f"SELECT e.client_uuid FROM samples s {ended_by} WHERE s.group_id IS NULL "
        "UNION SELECT e.client_uuid FROM groups g JOIN samples s ON s.group_id = g.group_id "
        f"{ended_by} WHERE g.state = ?"
    )
    return [row[0] for row in db.exec_driver_sql(query, (GroupState.POOLED,))]
