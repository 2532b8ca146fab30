"""The data classes of the ledger, the proxy's database. A field has the name of its column.

tables.py derives the tables `groups`, `siblings` and `feedback` from the fields of `GroupRecord`,
`SiblingRecord` and `FeedbackRecord`. A property of a column that the field's type cannot express,
such as an index, is in the metadata of the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fakevllm_adapters.protocol.swarm import Task

PRIMARY_KEY = {"primary_key": True}
"""Metadata of a field whose column is part of the table's primary key."""
INDEXED = {"index": True}
"""Metadata of a field whose column has an index of its own."""
NOT_A_COLUMN = {"is_column": False}
"""Metadata of a field that has no column, because its value is stored in rows of another table."""
BROKEN_OFF = "broken_off"
"""Value of the column `failure` for an answer that the engine did not complete."""
EVAL_KIND = "eval"
"""Value of the column `kind` for groups that were sampled for an evaluation. Such groups are not
requests of apps, so they are left out of all counts and lists of the apps' requests."""


class State(StrEnum):
    """The state of a group (a request with the answers that were sampled for it).

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
    """One of the answers that were sampled for a request: a row of the table `siblings`. The row
    also has the id of the group. A group is the request with all its answers.

    >>> SiblingRecord(index=0, served=True, best=True, status=200, text="42", reward=1.0).reward
    1.0
    """

    index: int = field(metadata=PRIMARY_KEY)
    """Position in the group, from 0. In SQL, write the name of this column in double quotes,
    because it is a keyword."""
    served: bool
    """Whether the app got this answer."""
    best: bool
    """Whether this answer has the highest reward of its group."""
    status: int
    """HTTP status with which the engine answered."""
    message_json: str | None = None
    """The assistant message as JSON; NULL without an answer."""
    text: str | None = None
    """Text of the answer."""
    tool_calls_json: str | None = None
    """Tool calls of the answer as JSON; NULL if it has none."""
    finish_reason: str | None = None
    """Reason why the answer ended, as the engine reported it, such as `stop` or `length`."""
    prompt_tokens: int | None = None
    """Number of tokens of the prompt."""
    completion_tokens: int | None = None
    """Number of tokens of the answer."""
    reward: float | None = None
    """Reward of the answer; NULL if it has none."""
    annotations_json: str | None = None
    """Keys that the hook added to the answer, as JSON."""
    error: str | None = None
    """Error message of the engine; NULL for an answer."""
    trained: bool = False
    """Whether a training step used the answer."""
    failure: str | None = None
    """Slug of the reason why the answer is not usable; NULL for a usable answer. `cut_off`,
    `broken_tool_call`, `empty` and `not_json` are failures of the model. `broken_off` is a failure
    of the engine."""
    advantage: float | None = None
    """Mean advantage of the answer's tokens in the step that trained the answer. NULL if no step
    trained it, or if the server is too old to report advantages."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer that is kept for a retry of its request. The app disconnected before it had
    received the whole answer.

    >>> KeptAnswer("g1", b"k", 0.0, 200, [("content-type", "application/json")], b"{}").status
    200
    """

    group_id: str
    key: bytes
    """Hash by which a retry of the request is recognised: `RequestIdentity.key` of
    groups/resend_detection.py."""
    until: float
    """Time at which the answer expires, in Unix seconds."""
    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    """The response body, in the app's format."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response in the format of OpenAI's Responses API. The app that requested the
    response can retrieve the response later.

    >>> StoredResponse("resp_1", None, "g1", 0.0, b"{}").app_key is None
    True
    """

    response_id: str
    app_key: str | None
    """Fingerprint of the API key with which the response was requested; None if the request had no
    key."""
    group_id: str | None
    """Id of the group (request) to which the response belongs. None only in old ledgers, for a
    deleted response that was never stored."""
    created_at: float
    """Time at which the response was made, in Unix seconds."""
    body: bytes | None
    """The response object as JSON. None if the request was passed through to the engine's own
    Responses route. In this case only the engine has the response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One request of an app, with its siblings. Siblings are the answers that were sampled for the
    request."""

    group_id: str = field(metadata=PRIMARY_KEY)
    """Id of the group."""
    received_at: float
    """Time at which the request arrived, in Unix seconds."""
    route: str
    """API format of the request: `chat`, `completions`, `responses` or `messages`."""
    model: str
    """Model name in the app's request."""
    streamed: bool
    """Whether the app requested a stream."""
    task_id: str | None
    """Id of the dataset task to which the request belongs; NULL if it belongs to none."""
    app_key: str | None
    """Fingerprint of the app's API key: the first 8 hex digits of a hash of the key."""
    request_json: str
    """Body of the app's request."""
    question: str
    """Text of the last user message, or the prompt."""
    num_siblings: int
    """Number of answers that were requested from the engine. Fewer answers may have arrived."""
    status: int
    """HTTP status of the response that the app got."""
    latency_s: float
    """Seconds from the arrival of the request to the end of its answer."""
    served_index: int | None
    """Index of the sibling that the app got; NULL if it got none."""
    best_index: int | None
    """Index of the sibling with the highest reward; NULL without rewards."""
    state: str = field(metadata=INDEXED)
    """A `State`."""
    reason: str | None
    """Reason why the group was not trained; NULL if it was trained or may still be trained."""
    hook_hash: str | None
    """Digest of the hook files that scored the group; NULL if no hook scored it."""
    siblings: Sequence[SiblingRecord] = field(metadata=NOT_A_COLUMN)
    step: int | None = field(default=None, metadata=INDEXED)
    """Number of the training step for which the server was collecting groups when this group
    ended."""
    trained_step: int | None = None
    """Number of the training step that used the group."""
    trained_version: int | None = None
    """Version of the weights that this training step made."""
    response_id: str | None = field(default=None, metadata=INDEXED)
    """Id by which later requests of the app may refer to the answer (`previous_response_id`)."""
    served_by: str | None = None
    """Rule by which the served sibling was chosen: best, random, lead or greedy. The lead is the
    answer to the app's own request. NULL if no sibling was chosen."""
    propensity: float | None = None
    """Probability with which the served sibling was chosen, given the answers and rewards."""
    cut: str | None = None
    """Reason why the group has fewer siblings than configured; NULL if it has all of them."""
    session_id: str | None = field(default=None, metadata=INDEXED)
    """Id of the session (conversation) to which the request belongs."""
    parent_session_id: str | None = None
    """Id of the session (conversation) that started this session, if this is the session of a
    sub-agent."""
    parent_id: str | None = None
    """Id of the group whose served answer this request continues."""
    kind: str | None = None
    """Role of the request in its session: a `Kind` of sessions/types.py. `eval` for a group that
    was sampled for an evaluation. Such a group belongs to no session."""
    evidence: str | None = None
    """How the session of the request was recognised: an `Evidence` of sessions/types.py."""
    asked_key: str | None = None
    """Hash of the request's history, in hex. With this hash, a restarted proxy recognises requests
    that continue the conversation."""
    turn: int | None = None
    """Number of the turn in the session, from 1. A message of the user begins a new turn, and a
    tool's result does not."""
    num_resent: int = field(default=0, metadata={"server_default": "0"})
    """Number of retries of the request that were answered with this group's answer."""
    answer_id: str | None = field(default=None, metadata=INDEXED)
    """Id of the answer in the response to the app. Feedback refers to the answer by this id."""
    run_id: str | None = None
    """Id of the server's training run. The weight versions of the group's model calls, and
    `eval_version`, are versions of this run."""
    job_hash: str | None = None
    """Digest of the training job that the server had when it collected the group. NULL if the job
    is unknown."""
    eval_id: str | None = None
    """Id of the evaluation for which the group was sampled. NULL for a request of an app."""
    eval_version: int | None = None
    """Version of the weights that sampled the group for an evaluation. NULL for a request of an
    app. Also NULL if the weights changed while the group was sampled."""
    arm: str | None = None
    """Arm whose weights answered the request: an `Arm` of release/arms.py. NULL if sessions are not
    assigned to arms, or if the request could not be assigned."""
    arm_propensity: float | None = None
    """Probability with which the request's session was assigned to this arm. NULL if `arm` is NULL.
    Also NULL if another arm answered, because the version of the session's own arm could not be
    sampled."""
    kept_answer: KeptAnswer | None = field(default=None, metadata=NOT_A_COLUMN)


class FeedbackState(StrEnum):
    """The state of one item of feedback on an answer.

    received  The feedback is stored. Its value is not known yet.
    kept      The feedback has no value, or cannot be trained. Its column `reason` has the cause.
    joined    The value was added to the answer's reward before the group's rewards were sent to
              the server.
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


TAKEN_BACK = "taken_back"
REPLACED = "replaced"
VOID = (TAKEN_BACK, REPLACED)
"""Reasons of feedback that is void: the user took it back or replaced it, so its value no longer
counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackRecord:
    """One item of feedback on an answer: a row of the table `feedback`. Rows of this table are
    never deleted. Columns about the outcome, such as the state and the value, are updated later.

    >>> FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, thumbs="up").kind
    'feedback'
    """

    group_id: str = field(metadata=PRIMARY_KEY)
    """Id of the group (request) to which the answer belongs. The column is not a foreign key for
    two reasons: a row of feedback may be written before the row of its group, and it must not
    change when the row of the group is replaced."""
    feedback_id: str = field(metadata=PRIMARY_KEY)
    """Id of the feedback. The app sends it, or the proxy makes it from the feedback."""
    received_at: float
    """Time at which the proxy received the feedback, in Unix seconds."""
    app_key: str | None = None
    """Fingerprint of the API key that sent the feedback; NULL without a key."""
    kind: str = "feedback"
    """`feedback` if the app sent the feedback. `next_message` or `regenerate` if the feedback is
    the next request of the conversation, from which the hook `on_feedback` computed a value."""
    score: float | None = None
    """Score that the app sent."""
    thumbs: str | None = None
    """`up` or `down`; NULL if the app sent neither."""
    edited: str | None = None
    """The user's corrected text of the answer."""
    comment: str | None = None
    """Comment that the app sent."""
    state: str = field(default=FeedbackState.RECEIVED, metadata=INDEXED)
    """A `FeedbackState`."""
    reason: str | None = None
    """Cause of the states `kept`, `dropped` and `lost`."""
    value: float | None = None
    """Value of the feedback. If the hook `on_feedback` is defined, it computes the value. Otherwise
    the value comes from the score or the thumbs."""
    baseline: float | None = None
    """Baseline that was subtracted from the value, if the feedback became a training sample of its
    own."""
    amount: float | None = None
    """In the state `joined`: amount that was added to the reward of the served answer. If the
    feedback became a training sample of its own: the advantage of the sample."""
    hook_hash: str | None = None
    """Digest of the hook files that computed the value; NULL if no hook computed it."""
    trained_step: int | None = None
    """Number of the training step that used the sample."""
    trained_version: int | None = None
    """Version of the weights that this training step made."""
    edit_state: str | None = None
    """A `FeedbackState`: what became of `edited` as a demonstration. None if the feedback has no
    edit, or if edits were not trained when it arrived. `state` is about the value alone."""
    edit_reason: str | None = None
    """Cause of the states `kept`, `dropped` and `lost` of the edit."""
    edit_step: int | None = None
    """Number of the training step that used the edit."""
    edit_version: int | None = None
    """Version of the weights that this training step made."""

    @property
    def is_void(self) -> bool:
        """Whether the feedback no longer counts, because the user took it back or replaced it."""
        return self.reason in VOID

    @property
    def is_edit_void(self) -> bool:
        """Whether the edit is not trained, because the user took it back or replaced it."""
        return self.edit_reason in VOID


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group (a request with its sampled answers) whose rewards are known, and which the server
    has not acknowledged yet.

    >>> ScoredGroup("g1", None, [1.0, None]).rewards
    [1.0, None]
    """

    group_id: str
    task_id: str | None
    rewards: list[float | None]
    """Reward of each sibling (sampled answer), in the order of their indices."""
    served_index: int | None = None
    parent_id: str | None = None
    hook_hash: str | None = None
    """Digest of the hook files with which the rewards were computed."""


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request, with the assistant message that answered it."""

    request_json: str
    message_json: str
    group_id: str


@dataclass(frozen=True, slots=True)
class StoredTask:
    """A dataset task that was registered at the proxy."""

    task: Task
    owner: str | None
    """Fingerprint of the API key that registered the task; None if the proxy required no key."""


@dataclass(frozen=True, slots=True)
class EvaluatedRewards:
    """The rewards of one dataset row in an evaluation."""

    version: int
    """Version of the weights that sampled the row."""
    task_id: str
    rewards: list[float]
    """Rewards of the samples at temperature 1. Samples without a reward are left out."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One point of the learning curve: the mean rewards of the groups (requests with their sampled
    answers) of one training step.

    >>> StepRow(step=1, groups=8, policy_mean=0.4, returned_best=0.7, without_signal=2).policy_mean
    0.4
    """

    step: int
    groups: int
    """Number of groups with at least one reward."""
    policy_mean: float | None
    """Mean reward of all scored siblings (sampled answers) that were not sampled greedily. This
    mean estimates the expected reward of the policy. None if there is no such sibling."""
    returned_best: float | None
    """Mean reward of the served siblings that were not chosen at random. None if no such sibling
    has a reward."""
    without_signal: int
    """Number of groups whose rewards are all equal, so that nothing could be learned from them."""
    returned_random: float | None = None
    """Mean reward of the served siblings that were chosen at random, as the setting
    `serve.random_fraction` allows. None if there is no such sibling."""
    hooks: tuple[str, ...] = ()
    """Digests of the hook files with which the step's rewards were computed."""
    jobs: tuple[str, ...] = ()
    """Digests of the training jobs that the server had when it collected the step's groups."""
    changed: str = ""
    """What changed since the previous step, such as `the hooks changed`; empty if nothing changed.
    After a change, the means of this step cannot be compared with those of earlier steps."""


@dataclass(frozen=True, slots=True)
class LedgerHealth:
    """The condition of the thread that writes the ledger (the proxy's database).

    >>> LedgerHealth(dropped=0, waiting=0, error=None).ok
    True
    """

    dropped: int
    """Number of writes that were dropped since the ledger was opened."""
    waiting: int
    """Number of writes in the queue."""
    error: str | None
    """Error message of the latest write; None if the latest write succeeded."""

    @property
    def ok(self) -> bool:
        """Whether the latest write succeeded."""
        return self.error is None
