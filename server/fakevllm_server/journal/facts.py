"""What the journal holds, as values: what changes are made of, and what reading finds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from fakevllm_server.journal.tables import GroupState

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
