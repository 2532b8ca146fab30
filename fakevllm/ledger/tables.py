"""The ledger's tables, named as their classes. migrations.py makes them; tests compare the two."""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Index, LargeBinary, MetaData, String, Table, text
from sqlmodel import Field, SQLModel


class _Row(SQLModel):
    metadata = MetaData()


def _group_id() -> Column[str]:
    key = ForeignKey("groups.group_id", ondelete="CASCADE")
    return Column(String, key, primary_key=True, nullable=False)


_PLACE = (
    *("received_at", "group_id", "app_key", "session_id", "parent_session_id", "parent_id"),
    *("turn", "kind", "evidence", "asked_key", "response_id"),
)


class Groups(_Row, table=True):
    """One request of the app."""

    __table_args__ = (Index("ix_groups_place", *_PLACE),)

    group_id: str = Field(primary_key=True)
    received_at: float
    """Unix seconds."""
    route: str
    model: str
    streamed: bool
    task_id: str | None = None
    app_key: str | None = None
    """First 8 hex digits of a hash of the app's key; never the key."""
    request_json: str
    question: str
    num_siblings: int
    """As asked for; fewer may have answered."""
    status: int
    """The HTTP status the app saw."""
    latency_s: float
    served_index: int | None = None
    best_index: int | None = None
    state: str = Field(index=True)
    """A `State` of records.py."""
    reason: str | None = None
    """Why it was not trained; NULL where it was, or still may be."""
    hook_hash: str | None = None
    step: int | None = Field(default=None, index=True)
    """The step that was being collected when the group ended."""
    trained_step: int | None = None
    trained_version: int | None = None
    response_id: str | None = Field(default=None, index=True)
    """What later requests may call its answer by."""
    served_by: str | None = None
    """How the served sibling was chosen: best, random, lead, greedy; NULL where there was no
    choice."""
    propensity: float | None = None
    """With which chance that one would have been served, of the same answers and rewards."""
    cut: str | None = None
    """Why there were fewer siblings than asked for."""
    session_id: str | None = Field(default=None, index=True)
    parent_session_id: str | None = None
    """The session that started this one."""
    parent_id: str | None = None
    """The group whose served answer the request went on from."""
    kind: str | None = None
    """What the request is to its session: a `Kind` of conversation/place.py."""
    evidence: str | None = None
    """How the session was found: an `Evidence` of conversation/place.py."""
    asked_key: str | None = None
    """Of the history, in hex: by it a proxy that was started again knows what continues it."""
    turn: int | None = None
    """From 1; a tool's result begins none."""
    num_resent: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    """How often the same request was sent again and got this group's answer."""
    answer_id: str | None = Field(default=None, index=True)
    """The answer's id as the app read it: what it gives feedback by."""
    run_id: str | None = None
    """The server's run whose weight versions its calls tell."""


class Siblings(_Row, table=True):
    """One completion of a request."""

    group_id: str = Field(sa_column=_group_id())
    index: int = Field(primary_key=True)
    """An SQL keyword: spell it "index", in double quotes."""
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
    """Of the model's making `cut_off`, `broken_tool_call`, `empty`, `not_json`; of the engine's
    `broken_off`."""
    advantage: float | None = None
    """Of the step that trained it, the mean over its tokens; NULL where none did, or a server of
    before it was told."""


class Calls(_Row, table=True):
    """One LLM call as the engine saw it. Blobs are little-endian int32 or float32 arrays."""

    group_id: str = Field(sa_column=_group_id())
    sibling: int = Field(primary_key=True)
    seq: int = Field(primary_key=True)
    prompt_ids: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    response_ids: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    logprobs: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    weight_versions_json: str
    weight_version: int | None = None
    """The oldest weights that sampled a token of it."""
    temperature: float
    finish_reason: str | None = None
    untrainable: str | None = None
    shaped: bool | None = None
    """Whether its tokens were chosen from less than the vocabulary, and not only masked; NULL: not
    known."""


class Feedback(_Row, table=True):
    """What was said of an answer. Rows stay; what became of it is filled in."""

    __table_args__ = (Index("ix_feedback_app", "app_key", "received_at"),)

    group_id: str = Field(primary_key=True)
    """Of no foreign key: feedback may come before its group's row, and outlives that."""
    feedback_id: str = Field(primary_key=True)
    received_at: float
    app_key: str | None = None
    kind: str
    """feedback: the app sent it; next_message, regenerate: what came next, where a hook makes a
    number of it."""
    score: float | None = None
    thumbs: str | None = None
    edited: str | None = None
    """A demonstration: what the answer should have been."""
    comment: str | None = None
    state: str = Field(index=True)
    """A `FeedbackState` of records.py."""
    reason: str | None = None
    value: float | None = None
    """What it counts for, by the hook or by itself."""
    baseline: float | None = None
    """What a sample's value was measured by."""
    amount: float | None = None
    """Added to the served sibling's reward (joined), or a sample's advantage."""
    hook_hash: str | None = None
    trained_step: int | None = None
    trained_version: int | None = None


class KeptAnswers(_Row, table=True):
    """What an app was to get that was lost before it had all of it; a streamed one may be here
    before its group."""

    __tablename__ = "kept_answers"  # pyright: ignore[reportAssignmentType]

    group_id: str = Field(primary_key=True)
    key: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    until: float
    status: int
    headers_json: str
    body: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class Tasks(_Row, table=True):
    task_id: str = Field(primary_key=True)
    main_query: str
    metadata_json: str
    created_at: float


class Meta(_Row, table=True):
    key: str = Field(primary_key=True)
    value: str


METADATA = _Row.metadata
GROUPS: Table = METADATA.tables["groups"]
SIBLINGS: Table = METADATA.tables["siblings"]
CALLS: Table = METADATA.tables["calls"]
FEEDBACK: Table = METADATA.tables["feedback"]
KEPT_ANSWERS: Table = METADATA.tables["kept_answers"]
TASKS: Table = METADATA.tables["tasks"]
META: Table = METADATA.tables["meta"]
