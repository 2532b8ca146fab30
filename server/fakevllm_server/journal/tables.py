"""The journal's SQL tables. Each class of this module describes the table of the same name.

`migrations.py` creates the tables. A test checks that the classes and the created tables agree.
Rows of four tables change their state as follows:

episode   claimed -> ended, or open again for the next claim
sample    without a group while its task lacks samples -> in a group
group     pooled -> planned -> consumed, or dropped with a reason
batch     planned -> done -> planned again if the checkpoint of an earlier step is restored

The group of an evaluation has the state `eval` from the start. It is never pooled or trained.
"""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import MetaData, UniqueConstraint, text
from sqlmodel import Field, SQLModel


class EpisodeState(StrEnum):
    """The state of an episode."""

    OPEN = "open"
    """The next client can claim the episode."""
    CLAIMED = "claimed"
    """A client has claimed the episode."""
    ENDED = "ended"
    """The episode has ended."""


class GroupState(StrEnum):
    """The state of a group."""

    POOLED = "pooled"
    """The group waits to be trained."""
    PLANNED = "planned"
    """The group is in the batch of a training step."""
    CONSUMED = "consumed"
    """A training step used the group."""
    DROPPED = "dropped"
    """The group is not trained. The column `reason` has the cause."""
    EVAL = "eval"
    """The group belongs to an evaluation, which is never trained."""


class BatchState(StrEnum):
    """The state of the batch of a training step."""

    PLANNED = "planned"
    """The batch is to be trained."""
    DONE = "done"
    """The batch was trained."""


class _Row(SQLModel):
    metadata = MetaData()


class Episodes(_Row, table=True):
    """An episode that a client has claimed at least once."""

    episode_id: str = Field(primary_key=True)
    """Id of the episode."""
    epoch: int
    """Number of the latest claim; the first is 1."""
    state: str = Field(index=True)
    """An `EpisodeState`: `open`, `claimed` or `ended`."""
    kind: str
    """Type of the episode, such as `train` or `eval`."""
    client_uuid: str
    """Id of the client that claimed the episode."""
    key: str
    """API key of the episode."""
    idle_limit_s: float
    """Seconds without a call after which the claim expires."""
    owner: str = Field(default="", sa_column_kwargs={"server_default": ""})
    """Owner id of the API key that claimed the episode: the key's name or, without a name, its
    fingerprint. "" if the server requires no key."""
    idempotency_key: str = Field(default="", sa_column_kwargs={"server_default": ""})
    """Idempotency key of the claim request; "" if the client sent none."""
    body_hash: bytes = Field(default=b"", sa_column_kwargs={"server_default": text("x''")})
    """Hash of the claim request's body."""


class Calls(_Row, table=True):
    """A captured LLM call with its tokens. After training, the row is kept while the call may have
    to be trained again. This time ends when a few newer checkpoints exist."""

    __table_args__ = (UniqueConstraint("owner", "seq"),)

    id: int | None = Field(default=None, primary_key=True)
    """Number of the row."""
    owner: str
    """`<group>/<index>` for a sibling, the claim's uuid for an episode."""
    group_id: str | None = Field(default=None, index=True)
    """Group of the sibling; NULL for an episode."""
    seq: int
    """Index of the call among the calls of its owner, from 0."""
    prompt_ids: bytes
    """Token ids as little-endian int32. Empty if the prompt is in the table `prompts`. If
    `is_compressed` is 1, this column and the next three columns are compressed (see
    compression.py)."""
    response_ids: bytes
    """Token ids as little-endian int32."""
    logprobs: bytes | None = None
    """Log-probabilities, exactly as the engine reported them. They are little-endian float32 if no
    value loses precision, else float64."""
    facts_json: str
    """Weight versions, temperature, finish reason, reason why the call is untrainable, allowed
    token sets, and the replica of a fleet. Unknown facts are left out."""
    digest: bytes
    """Digest of the call. It covers the whole prompt and the uncompressed contents of the three
    columns above, with the log-probabilities as float64. The digest detects data that the disk has
    damaged. A damaged call is not trained."""
    prompt: int | None = Field(default=None, index=True)
    """Row of a long prompt in the table `prompts`; NULL if the prompt is in this row."""
    is_compressed: bool = Field(default=False, sa_column_kwargs={"server_default": text("0")})
    """Whether the columns of the row are compressed. 0 in rows that older servers wrote."""


class Prompts(_Row, table=True):
    """A long prompt. Calls with the same prompt share the row. SQL triggers count the calls of a
    prompt, and delete the prompt together with its last call."""

    __table_args__ = {"sqlite_autoincrement": True}

    id: int | None = Field(default=None, primary_key=True)
    """Number of the row."""
    slices: str
    """The prompt as a list of slices of rows of the table `pieces`: `[[piece_id, start, length],
    ...]`. `start` and `length` are in bytes."""
    num_calls: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    """Number of calls that have the prompt."""


class Pieces(_Row, table=True):
    """A part of one or more prompts: token ids as little-endian int32, compressed (see
    compression.py). SQL triggers count the prompts that use a piece, and delete the piece together
    with the last of these prompts."""

    __table_args__ = {"sqlite_autoincrement": True}

    piece_id: int | None = Field(default=None, primary_key=True)
    """Number of the row."""
    data: bytes
    """The token ids of the piece, compressed."""
    num_prompts: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    """Number of prompts that use the piece."""


class LoosePieces(_Row, table=True):
    """A piece (a part of stored prompts) that may have bytes that no prompt uses, because a prompt
    that used the piece was deleted. SQL triggers add the row, and delete it together with the
    piece."""

    __tablename__ = "loose_pieces"  # pyright: ignore[reportAssignmentType]

    piece_id: int = Field(primary_key=True)
    """Row of the piece in the table `pieces`."""
    num_deleted: int
    """Number of prompts with the piece that were deleted. It shows if another prompt was deleted
    while the piece was examined."""


class Samples(_Row, table=True):
    """An ended episode with its reward, or one sibling (answer) of an ended group with its
    reward."""

    owner: str = Field(primary_key=True)
    """`<group>/<index>` for a sibling, the claim's uuid for an episode."""
    group_id: str | None = Field(default=None, index=True)
    """NULL while the sample waits for other samples of its task."""
    task_id: str | None = None
    """Task of the episode; NULL for a sibling."""
    index: int
    """Index of the sample in its group."""
    reward: float | None = None
    """Reward of the sample; NULL if it has none."""


class Groups(_Row, table=True):
    """A group of samples whose rewards are compared. A row can also be a feedback sample (an answer
    that is trained again because of later feedback), or the demonstrations from a user's edit."""

    seq: int | None = Field(default=None, primary_key=True)
    """Number of the group, in the order in which the groups ended."""
    group_id: str = Field(unique=True)
    """Id of the group."""
    state: str = Field(index=True)
    """A `GroupState`: `pooled`, `planned`, `consumed`, `dropped` or `eval`."""
    reason: str | None = None
    """Reason why the group was dropped."""
    step: int | None = Field(default=None, index=True)
    """Step that the group was planned for."""
    position: int | None = None
    """Index in the batch of that step."""
    advantage: float | None = None
    """Advantage of a feedback sample; NULL for a group of compared samples."""
    hook_hash: str = Field(default="", sa_column_kwargs={"server_default": ""})
    """Digest of the hook files that gave the rewards; empty if it is unknown."""
    demonstrates: str | None = None
    """Demonstration loss of a group that was made from a user's edit of an answer; NULL for other
    groups. The samples of such a group have no rewards, and their calls no log-probabilities."""
    is_logged: bool = Field(default=False, sa_column_kwargs={"server_default": text("0")})
    """Whether this is a logged group: a group of an earlier run, which `fakevllm retrain` sends."""


class Drops(_Row, table=True):
    """A reason for which groups were dropped, and the number of groups that were ever dropped for
    this reason. SQL triggers update the number."""

    reason: str = Field(primary_key=True)
    """Slug of the reason: the text before the first colon."""
    num: int
    """Number of groups that were dropped for this reason."""


class Submissions(_Row, table=True):
    """An acknowledged request with its reply. A repeated request gets the same reply."""

    key: str = Field(primary_key=True)
    """Key by which a repetition is recognised: `group:`, `sample:` or `episode:` with the id."""
    body_hash: bytes
    """Hash of the request's body. A repetition with another body gets a 409."""
    reply_json: str
    """The reply, which every repetition gets too."""
    at: float
    """Time at which the request was stored, in Unix seconds."""


class Batches(_Row, table=True):
    """The batch of one training step, planned before the step is trained."""

    step: int = Field(primary_key=True)
    """Number of the training step."""
    version: int
    """Version of the weights before the step."""
    groups_hash: str
    """Hash of the ids of the batch's groups, in order."""
    state: str = Field(index=True)
    """A `BatchState`: `planned` or `done`."""


class Checkpoints(_Row, table=True):
    """A checkpoint folder that is complete. A folder on disk without a row here is incomplete."""

    step: int = Field(primary_key=True)
    """Number of the training step after which the checkpoint was written."""
    folder: str
    """Name below the run directory's `checkpoints`."""
    version: int
    """Version of the weights in the checkpoint."""
    digest: str
    """Digest of the folder's files."""
    reward_mean: float | None = None
    """Mean reward of the steps since the previous checkpoint."""
    at: float
    """Time at which the checkpoint was complete, in Unix seconds."""


class SideCheckpoints(_Row, table=True):
    """The checkpoint of a version that is no longer part of the run, because training went back to
    an earlier version. New steps of the run use the same step numbers as the discarded steps."""

    __tablename__ = "side_checkpoints"  # pyright: ignore[reportAssignmentType]

    version: int = Field(primary_key=True)
    """Version of the weights in the checkpoint."""
    step: int
    """Number of the training step after which the checkpoint was written."""
    folder: str
    """Name below the run directory's `checkpoints`."""
    digest: str
    """Digest of the folder's files."""
    reward_mean: float | None = None
    """Mean reward of the steps since the previous checkpoint."""
    at: float
    """Time at which the checkpoint was complete, in Unix seconds."""


class Publications(_Row, table=True):
    """Weights that the rollout engine has served. A row has their version and the step that made
    them."""

    version: int = Field(primary_key=True)
    """Version of the weights."""
    step: int
    """Number of the training step that made the weights."""
    at: float
    """Time at which the weights were published, in Unix seconds."""


class Entries(_Row, table=True):
    """An entry of the run log, in the form in which proxies read it."""

    seq: int = Field(primary_key=True)
    """Number of the entry, in the order of the run log."""
    kind: str
    """Kind of the entry, such as `step` or `dropped`."""
    step: int
    """Number of the training step at the time of the entry."""
    version: int
    """Version of the weights at the time of the entry."""
    entry_json: str
    """The whole entry as JSON."""


class Releases(_Row, table=True):
    """An entry of the history of releases: a decision about a version of the weights, or about all
    releases. Rows are appended, and never changed or deleted."""

    number: int | None = Field(default=None, primary_key=True)
    """Number of the decision, in the order of the decisions."""
    id: str = Field(unique=True)
    """Id of the request, with which a repeated request is recognized."""
    request_hash: bytes
    """Hash of the request's kind and body."""
    decision: str
    """Kind of the decision: a `Decision` of protocol/releases.py."""
    version: int | None = None
    """Version that the decision is about; NULL if it is about all releases."""
    parent: int | None = None
    """Version from whose weights the training of `version` began."""
    newest: int
    """Highest version at the time of the decision."""
    restored: int | None = None
    """Version to which training went back; NULL if training did not go back. The restored weights
    got a new version number."""
    is_rollback: bool
    """Whether the request was a rollback, which rejects all versions that descend from
    `restored`."""
    pinned_json: str
    """JSON list of further versions whose checkpoints are kept. `null` if the decision has no list.
    A list is valid until a later decision has another list."""
    at: float
    """Time of the decision in Unix seconds."""
    decided_by: str
    """Name of the operator's API key, `operator` if the key has no name, or `gate` if the release
    gate decided."""
    evidence_json: str
    """Numbers and texts that explain the decision, as JSON."""


class Meta(_Row, table=True):
    """A stored fact about the run, such as the run's latest job."""

    key: str = Field(primary_key=True)
    """Name of the fact."""
    value: str
    """The fact as text."""
