"""What goes into the ledger and what comes out: plain data, named as the columns are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """What became of a group.

    served    answered, not for training
    failed    the app got an error
    scored    rewards known, not yet acknowledged by the server
    pooled    acknowledged, waits to be trained
    trained   went into a step
    dropped   scored or pooled, will not be trained: see the reason
    lost      a crash undid its training, or the server could not be reached
    """

    SERVED = "served"
    FAILED = "failed"
    SCORED = "scored"
    POOLED = "pooled"
    TRAINED = "trained"
    DROPPED = "dropped"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingRecord:
    """
    >>> SiblingRecord(index=0, served=True, best=True, status=200, text="42", reward=1.0).reward
    1.0
    """

    index: int
    served: bool
    best: bool
    status: int
    message_json: str | None = None
    text: str | None = None
    tool_calls_json: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reward: float | None = None
    annotations_json: str | None = None
    error: str | None = None
    trained: bool = False
    failure: str | None = None
    """Why its answer is no answer, by whoever's fault: a word of failures.py's."""
    advantage: float | None = None


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """What an app was to get that was lost before it had all of it: for the same request, should
    it be sent again.

    >>> KeptAnswer("g1", b"k", 0.0, 200, [("content-type", "application/json")], b"{}").status
    200
    """

    group_id: str
    key: bytes
    """Of the request: `RequestIdentity.key` in groups/attempts.py."""
    until: float
    """Unix seconds."""
    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    """In the app's format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One request and its siblings; tables.py documents the columns."""

    group_id: str
    received_at: float
    route: str
    model: str
    streamed: bool
    task_id: str | None
    app_key: str | None
    request_json: str
    question: str
    num_siblings: int
    status: int
    latency_s: float
    served_index: int | None
    best_index: int | None
    state: str
    reason: str | None
    hook_hash: str | None
    siblings: Sequence[SiblingRecord]
    step: int | None = None
    trained_step: int | None = None
    trained_version: int | None = None
    response_id: str | None = None
    served_by: str | None = None
    propensity: float | None = None
    cut: str | None = None
    session_id: str | None = None
    parent_session_id: str | None = None
    parent_id: str | None = None
    turn: int | None = None
    kind: str | None = None
    evidence: str | None = None
    asked_key: str | None = None
    num_resent: int = 0
    answer_id: str | None = None
    run_id: str | None = None
    kept: KeptAnswer | None = None
    """No column: a row beside it."""


class FeedbackState(StrEnum):
    """What became of a feedback.

    received  taken; what it counts for is not known yet
    kept      counts for nothing, or can be trained by nothing: see the reason
    joined    added to the reward of its group, before that was sent
    waiting   a sample to be: its group is on its way, or there are too few to centre it by
    pooled    that sample was acknowledged, waits to be trained
    trained   went into a step
    dropped   will not be trained: see the reason
    lost      a crash undid its training, or the server refused it
    """

    RECEIVED = "received"
    KEPT = "kept"
    JOINED = "joined"
    WAITING = "waiting"
    POOLED = "pooled"
    TRAINED = "trained"
    DROPPED = "dropped"
    LOST = "lost"


VOID = ("taken_back", "replaced")
"""Why a feedback counts for nothing that did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackRecord:
    """
    >>> FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, thumbs="up").kind
    'feedback'
    """

    group_id: str
    feedback_id: str
    received_at: float
    app_key: str | None = None
    kind: str = "feedback"
    score: float | None = None
    thumbs: str | None = None
    edited: str | None = None
    comment: str | None = None
    state: str = FeedbackState.RECEIVED
    reason: str | None = None
    value: float | None = None
    baseline: float | None = None
    amount: float | None = None
    hook_hash: str | None = None
    trained_step: int | None = None
    trained_version: int | None = None

    @property
    def is_void(self) -> bool:
        return self.reason in VOID


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group whose rewards are known and not yet acknowledged.

    >>> ScoredGroup("g1", None, "1+1?", [1.0, None]).rewards
    [1.0, None]
    """

    group_id: str
    task_id: str | None
    question: str
    rewards: list[float | None]
    """By sibling index."""
    served_index: int | None = None
    parent_id: str | None = None


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request and the message its app got."""

    request_json: str
    message_json: str


@dataclass(frozen=True, slots=True)
class StepRow:
    """One point of the learning curve: the groups that were collected in one step.

    >>> StepRow(step=1, groups=8, policy_mean=0.4, returned_best=0.7, without_signal=2).policy_mean
    0.4
    """

    step: int
    groups: int
    """With at least one reward."""
    policy_mean: float
    """Mean reward of all scored siblings but greedy ones: what the policy is worth."""
    returned_best: float | None
    """Mean reward of what the apps got, but for those who got any sibling; None where no served
    sibling was scored."""
    without_signal: int
    """Groups whose rewards are all equal."""
    returned_random: float | None = None
    """Mean reward of what apps got that got any sibling: `serve.random_fraction`."""


@dataclass(frozen=True, slots=True)
class LedgerHealth:
    """
    >>> LedgerHealth(dropped=0, waiting=0, error=None).ok
    True
    """

    dropped: int
    """Writes given up since the start."""
    waiting: int
    """Writes in the queue."""
    error: str | None
    """Why the last write failed; None where it did not."""

    @property
    def ok(self) -> bool:
        return self.error is None
