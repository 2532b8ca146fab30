"""The data classes of the ledger. Their fields have the names of the columns in the tables.

`GroupRecord`, `SiblingRecord` and `FeedbackRecord` define the columns of their tables, because
tables.py derives the tables from the fields. A property of a column that the field's type cannot
express, such as an index, is in the metadata of the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fakevllm_adapters.protocol.swarm import Task

PRIMARY_KEY = {"primary_key": True}
"""Field metadata: the column is part of the table's primary key."""
INDEXED = {"index": True}
"""Field metadata: the column has an index of its own."""
NOT_A_COLUMN = {"is_column": False}
"""Field metadata: the value is stored in rows of another table."""


class State(StrEnum):
    """The state of a group.

    served    The request was answered. It is not used for training.
    failed    The app got an error.
    scored    The rewards are known. The server has not acknowledged them yet.
    pooled    The server has acknowledged the rewards. The group waits to be trained.
    trained   A training step used the group.
    dropped   The group will not be trained. Its column `reason` has the cause.
    lost      A crash undid the group's training, or the server could not be reached.
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
    """One of the answers that were sampled for a request. Its row in the table also has the id of
    its group.

    >>> SiblingRecord(index=0, served=True, best=True, status=200, text="42", reward=1.0).reward
    1.0
    """

    index: int = field(metadata=PRIMARY_KEY)
    """Position in the group, from 0. SQL needs the name in double quotes: it is a keyword."""
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
    """Slug of the reason why the completion is not a usable answer; NULL for a usable answer. The
    model causes `cut_off`, `broken_tool_call`, `empty` and `not_json`; the engine causes
    `broken_off`."""
    advantage: float | None = None
    """Mean advantage over the completion's tokens, in the step that trained it. NULL if no step
    trained the completion, or if the server is older than this column."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer that is kept for a retry of its request, because its app disconnected before it had
    the whole answer.

    >>> KeptAnswer("g1", b"k", 0.0, 200, [("content-type", "application/json")], b"{}").status
    200
    """

    group_id: str
    key: bytes
    """Key of the request: `RequestIdentity.key` of groups/resend_detection.py."""
    until: float
    """Time at which the answer expires, in Unix seconds."""
    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    """The response body, in the app's format."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response of the Responses format, stored so that its app can retrieve it.

    >>> StoredResponse("resp_1", None, "g1", 0.0, b"{}").app_key is None
    True
    """

    response_id: str
    app_key: str | None
    """Fingerprint of the API key that made the response; None if the request had no key."""
    group_id: str | None
    """Group of the request. None in old ledgers, for a deleted response that was never stored."""
    created_at: float
    """Unix time in seconds."""
    body: bytes | None
    """The response object in JSON. None if the engine's own route made the response, so that only
    the engine has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One request of an app, with its siblings."""

    group_id: str = field(metadata=PRIMARY_KEY)
    received_at: float
    """Unix seconds."""
    route: str
    model: str
    streamed: bool
    task_id: str | None
    app_key: str | None
    """First 8 hex digits of a hash of the app's key; never the key."""
    request_json: str
    question: str
    num_siblings: int
    """Number of siblings requested; fewer may have answered."""
    status: int
    """HTTP status that the app got."""
    latency_s: float
    served_index: int | None
    best_index: int | None
    state: str = field(metadata=INDEXED)
    """A `State`."""
    reason: str | None
    """Reason why the group was not trained; NULL if it was trained or may still be trained."""
    hook_hash: str | None
    siblings: Sequence[SiblingRecord] = field(metadata=NOT_A_COLUMN)
    step: int | None = field(default=None, metadata=INDEXED)
    """The step that was collecting groups when the group ended."""
    trained_step: int | None = None
    trained_version: int | None = None
    response_id: str | None = field(default=None, metadata=INDEXED)
    """The id by which later requests may refer to the answer."""
    served_by: str | None = None
    """Rule by which the served sibling was chosen: best, random, lead or greedy. NULL if no sibling
    was chosen."""
    propensity: float | None = None
    """Probability with which this sibling would be served, given the same answers and rewards."""
    cut: str | None = None
    """Reason why the group has fewer siblings than requested."""
    session_id: str | None = field(default=None, metadata=INDEXED)
    parent_session_id: str | None = None
    """The session that started this session."""
    parent_id: str | None = None
    """The group whose served answer the request continues."""
    kind: str | None = None
    """Role of the request in its session: a `Kind` of sessions/types.py."""
    evidence: str | None = None
    """Evidence by which the session was found: an `Evidence` of sessions/types.py."""
    asked_key: str | None = None
    """Key of the request's history, in hex. A restarted proxy finds continuations by it."""
    turn: int | None = None
    """Number of the turn in the session, from 1. A tool's result begins no turn."""
    num_resent: int = field(default=0, metadata={"server_default": "0"})
    """Number of retries of the request that got this group's answer."""
    answer_id: str | None = field(default=None, metadata=INDEXED)
    """Id of the answer as the app got it, with which feedback refers to the answer."""
    run_id: str | None = None
    """The server's run to which the weight versions of the group's calls belong."""
    job_hash: str | None = None
    """Digest of the server's job for which the group was collected. NULL if it is unknown."""
    kept_answer: KeptAnswer | None = field(default=None, metadata=NOT_A_COLUMN)


class FeedbackState(StrEnum):
    """The state of one feedback.

    received  The feedback is stored. Its value is not known yet.
    kept      The feedback has no value, or cannot be trained. Its column `reason` has the cause.
    joined    The value was added to the reward of the answer before the group was sent.
    waiting   The feedback will become a training sample of its own. It waits until the server has
              acknowledged the group, and until the app has enough values for a baseline.
    pooled    The server has acknowledged the sample. The sample waits to be trained.
    trained   A training step used the sample.
    dropped   The sample will not be trained. The column `reason` has the cause.
    lost      A crash undid the sample's training, or the server refused the sample.
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
"""Reasons of void feedback: it was taken back or replaced, and its value no longer counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackRecord:
    """Feedback on an answer. Rows of feedback are never deleted. The fields about the outcome, such
    as the state and the value, are filled in later.

    >>> FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, thumbs="up").kind
    'feedback'
    """

    group_id: str = field(metadata=PRIMARY_KEY)
    """Id of the answer's group. The column is no foreign key, because the row of the feedback may
    be written before the row of the group, and stays unchanged when the row of the group is
    replaced."""
    feedback_id: str = field(metadata=PRIMARY_KEY)
    received_at: float
    """Unix seconds."""
    app_key: str | None = None
    kind: str = "feedback"
    """`feedback` if the app sent it. `next_message` or `regenerate` if a hook derived a value from
    the request that followed."""
    score: float | None = None
    thumbs: str | None = None
    edited: str | None = None
    """Corrected text of the answer: a demonstration."""
    comment: str | None = None
    state: str = field(default=FeedbackState.RECEIVED, metadata=INDEXED)
    """A `FeedbackState`."""
    reason: str | None = None
    value: float | None = None
    """Value of the feedback: the hook's if there is one, else derived from score or thumbs."""
    baseline: float | None = None
    """Baseline that was subtracted from a sample's value."""
    amount: float | None = None
    """Amount added to the served sibling's reward (joined), or a sample's advantage."""
    hook_hash: str | None = None
    trained_step: int | None = None
    trained_version: int | None = None

    @property
    def is_void(self) -> bool:
        """Whether the user took the feedback back or replaced it."""
        return self.reason in VOID


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group whose rewards are known, and which the server has not acknowledged yet.

    >>> ScoredGroup("g1", None, "1+1?", [1.0, None]).rewards
    [1.0, None]
    """

    group_id: str
    task_id: str | None
    question: str
    rewards: list[float | None]
    """Reward of each sibling, by its index."""
    served_index: int | None = None
    parent_id: str | None = None
    hook_hash: str | None = None
    """Digest of the hook files that gave the rewards."""


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request, and the assistant message with which it was answered."""

    request_json: str
    message_json: str
    group_id: str


@dataclass(frozen=True, slots=True)
class StoredTask:
    """A task that was registered at the proxy."""

    task: Task
    owner: str | None
    """Fingerprint of the API key that registered the task; None if the proxy required no key."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One point of the learning curve, with the mean rewards of the groups that belong to one
    training step.

    >>> StepRow(step=1, groups=8, policy_mean=0.4, returned_best=0.7, without_signal=2).policy_mean
    0.4
    """

    step: int
    groups: int
    """Number of groups with at least one reward."""
    policy_mean: float
    """Mean reward of all scored siblings except greedy ones: an estimate of the policy's value."""
    returned_best: float | None
    """Mean reward of the served siblings, without those that were chosen at random. None if no such
    sibling was scored."""
    without_signal: int
    """Number of groups whose rewards are all equal."""
    returned_random: float | None = None
    """Mean reward of the served siblings that were chosen at random (`serve.random_fraction`). None
    if there is none."""
    hooks: tuple[str, ...] = ()
    """Digests of the hook files that gave the step's rewards."""
    jobs: tuple[str, ...] = ()
    """Digests of the server's jobs for which the step's groups were collected."""
    changed: str = ""
    """What changed since the step before, such as `the hooks changed`; empty if nothing changed.
    The means of this step cannot be compared with earlier ones."""


@dataclass(frozen=True, slots=True)
class LedgerHealth:
    """The condition of the thread that writes the ledger.

    >>> LedgerHealth(dropped=0, waiting=0, error=None).ok
    True
    """

    dropped: int
    """Number of writes dropped since the start."""
    waiting: int
    """Number of writes in the queue."""
    error: str | None
    """Error of the latest write; None if it succeeded."""

    @property
    def ok(self) -> bool:
        """Whether the latest write succeeded."""
        return self.error is None
