"""The tables of the ledger (the proxy's SQLite file) as SQLAlchemy objects. The module `migrations`
creates the tables in the file.

The columns of `groups`, `siblings` and `feedback` are derived from the fields of the dataclasses
GroupRecord, SiblingRecord and FeedbackRecord. A test compares the tables with the schema that the
migrations create.
"""

from __future__ import annotations

from dataclasses import Field, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    text,
)

from fakevllm.ledger.records import FeedbackRecord, GroupRecord, SiblingRecord

METADATA = MetaData()
VIEWS = MetaData()

_SQL_TYPES = {str: String, int: Integer, float: Float, bool: Boolean}


def _columns(record: type[GroupRecord | SiblingRecord | FeedbackRecord]) -> list[Column[Any]]:
    """Return the SQL columns for a record class. Each stored field of the class has one column with
    the same name. A field of type `X | None` becomes a nullable column."""
    hints = get_type_hints(record)
    stored = [one for one in fields(record) if one.metadata.get("is_column", True)]
    return [_column(one, hints[one.name]) for one in stored]


def _column(record_field: Field[Any], hint: Any) -> Column[Any]:
    types = set(get_args(hint) or (hint,))
    is_nullable = NoneType in types
    (python_type,) = types - {NoneType}
    server_default = record_field.metadata.get("server_default")
    return Column(
        record_field.name,
        _SQL_TYPES[python_type],
        primary_key=record_field.metadata.get("primary_key", False),
        nullable=is_nullable,
        server_default=None if server_default is None else text(server_default),
    )


def _indexes(record: type[GroupRecord | FeedbackRecord], name: str) -> list[Index]:
    """Return one index for each field of a record class that has the metadata INDEXED."""
    indexed = [one.name for one in fields(record) if one.metadata.get("index")]
    return [Index(f"ix_{name}_{column}", column) for column in indexed]


def _group_id() -> Column[str]:
    group = ForeignKey("group_rows.group_id", ondelete="CASCADE")
    return Column("group_id", String, group, primary_key=True)


# `ix_groups_place` contains every column that a proxy reads at its start. Reading these columns
# from the table is slow, because in a row of the table they are stored after the whole request.
# Read requests from the view GROUPS: `request_json` is empty in this table if the request is stored
# as slices of pieces (see contents.py of fakevllm_runtime).
GROUP_ROWS = Table(
    "group_rows",
    METADATA,
    *_columns(GroupRecord),
    Column("request_slices", String),
    Column("request_digest", LargeBinary),
    *_indexes(GroupRecord, "groups"),
    Index(
        "ix_groups_place",
        *("received_at", "group_id", "app_key", "session_id", "parent_session_id", "parent_id"),
        *("turn", "kind", "evidence", "asked_key", "response_id"),
    ),
    # This index has only the groups of sessions that were assigned to arms.
    Index("ix_groups_arm", "received_at", sqlite_where=text("arm_propensity IS NOT NULL")),
)

# Read messages from the view SIBLINGS: in this table, `message_json` has neither the text nor the
# tool calls (see stored_messages.py).
SIBLING_ROWS = Table(
    "sibling_rows",
    METADATA,
    _group_id(),
    *_columns(SiblingRecord),
    Column("text_at", Integer),
    Column("tool_calls_at", Integer),
)


def _call_columns() -> list[Column[Any]]:
    """Return the columns of one LLM call as the engine saw it. The column for the group's id is not
    among them.

    The blobs are arrays of little-endian int32 or float32. `weight_version` is the oldest weight
    version that sampled a token of the call. `shaped` is true if tokens were sampled from a
    restricted part of the vocabulary. `shaped` is NULL if this is not known.
    """
    return [
        Column("sibling", Integer, primary_key=True, autoincrement=False),
        Column("seq", Integer, primary_key=True, autoincrement=False),
        Column("prompt_ids", LargeBinary, nullable=False),
        Column("response_ids", LargeBinary, nullable=False),
        Column("logprobs", LargeBinary),
        Column("weight_versions_json", String, nullable=False),
        Column("weight_version", Integer),
        Column("temperature", Float, nullable=False),
        Column("finish_reason", String),
        Column("untrainable", String),
        Column("shaped", Boolean),
    ]


# Read tokens from the view CALLS: `prompt_ids` is empty in this table if the prompt is a row of the
# table `prompts`, and `response_ids` is empty if the response is a piece.
CALL_ROWS = Table(
    "call_rows",
    METADATA,
    _group_id(),
    *_call_columns(),
    Column("prompt", Integer),
    Column("response_piece", Integer),
    Index(
        "ix_calls_response_piece",
        "response_piece",
        sqlite_where=text("response_piece IS NOT NULL"),
    ),
)

# A long prompt, which the siblings of a group share.
PROMPTS = Table(
    "prompts",
    METADATA,
    Column("prompt_id", Integer, primary_key=True),
    Column("slices", String, nullable=False),
    Column("digest", LargeBinary, nullable=False),
)

# A part of requests and prompts, or a response that the next prompt may repeat.
PIECES = Table(
    "pieces",
    METADATA,
    Column("piece_id", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

# The views have whole requests, messages and prompts.
GROUPS = Table("groups", VIEWS, *_columns(GroupRecord))
SIBLINGS = Table("siblings", VIEWS, Column("group_id", String), *_columns(SiblingRecord))
CALLS = Table("calls", VIEWS, Column("group_id", String), *_call_columns())

FEEDBACK = Table(
    "feedback",
    METADATA,
    *_columns(FeedbackRecord),
    *_indexes(FeedbackRecord, "feedback"),
    Index("ix_feedback_app", "app_key", "received_at"),
    # This index has only the edits that are to be trained.
    Index("ix_feedback_edit", "edit_state", sqlite_where=text("edit_state IS NOT NULL")),
)

# A `RescoredSibling` with its group. `hook_hash` is the content hash of the other hooks.
RESCORED = Table(
    "rescored",
    METADATA,
    _group_id(),
    Column("hook_hash", String, primary_key=True),
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("reward", Float),
    Column("annotations_json", String),
    Column("reason", String),
    Column("scored_at", Float, nullable=False),
)

# A group whose contents were deleted. `cause` is a `Cause` of forgotten_groups.py. `is_sent` is 0
# until the server has deleted the captured calls of the group.
FORGOTTEN_GROUPS = Table(
    "forgotten_groups",
    METADATA,
    Column("group_id", String, primary_key=True),
    Column("cause", String, nullable=False),
    Column("forgotten_at", Float, nullable=False),
    Column("is_sent", Boolean, nullable=False),
    Index("ix_forgotten_unsent", "group_id", sqlite_where=text("NOT is_sent")),
)

# A piece that a forgotten group used, and whose bytes are not erased yet.
LOOSE_PIECES = Table(
    "loose_pieces",
    METADATA,
    Column("piece_id", Integer, primary_key=True, autoincrement=False),
)

# A `KeptAnswer`. The row of a streamed answer may be written before the row of its group, so its
# group id is no foreign key.
KEPT_ANSWERS = Table(
    "kept_answers",
    METADATA,
    Column("group_id", String, primary_key=True),
    Column("key", LargeBinary, nullable=False),
    Column("until", Float, nullable=False),
    Column("status", Integer, nullable=False),
    Column("headers_json", String, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

# A `StoredResponse`. The row of a streamed response may be written before the row of its group, so
# its group id is no foreign key. The body is NULL if only the engine has the response, and after a
# deletion. The row of a deleted response remains, because the group's row may be written later.
RESPONSES = Table(
    "responses",
    METADATA,
    Column("response_id", String, primary_key=True),
    Column("owner", String, primary_key=True),
    Column("group_id", String),
    Column("created_at", Float, nullable=False),
    Column("body", LargeBinary),
    Column("deleted_at", Float),
)

# A `StoredTask`.
TASKS = Table(
    "tasks",
    METADATA,
    Column("task_id", String, primary_key=True),
    Column("main_query", String, nullable=False),
    Column("metadata_json", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("owner", String),
)

META = Table(
    "meta",
    METADATA,
    Column("key", String, primary_key=True),
    Column("value", String, nullable=False),
)

# The counters: see counters.py, which keeps them. `subject` is `state` (number of groups by state),
# `untrained` (groups by the slug of their reason), `failure` (siblings by failure), `feedback`
# (feedback by state), `forgotten` (groups without contents by the cause) or `tokens` (numbers of
# tokens: `sampled`, `served` and `trained` of the apps' requests, and `evaluated`, which were
# sampled for evaluations).
COUNTERS = Table(
    "counters",
    METADATA,
    Column("subject", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("num", Integer, nullable=False),
)

# A `StepSums` for each step of each run. The run id is empty if the run is unknown.
STEP_COUNTERS = Table(
    "step_counters",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("num_groups", Integer, nullable=False),
    Column("num_samples", Integer, nullable=False),
    Column("reward_sum", Float, nullable=False),
    Column("num_best", Integer, nullable=False),
    Column("best_sum", Float, nullable=False),
    Column("num_flat", Integer, nullable=False),
    Column("num_random", Integer, nullable=False),
    Column("random_sum", Float, nullable=False),
)

# Numbers of tokens of a step's answers: of all siblings, of those that apps got, and of those that
# were trained. Unlike STEP_COUNTERS, groups without a reward count too.
STEP_TOKENS = Table(
    "step_tokens",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("num_sampled", Integer, nullable=False),
    Column("num_served", Integer, nullable=False),
    Column("num_trained", Integer, nullable=False),
)

# A version of the weights, and the training step that made it. `step_s` has the seconds since the
# step before, and `update_s` the seconds that the trainer needed. Both are NULL if the server did
# not measure them, or if the ledger read the step before it had this table.
TRAINED_VERSIONS = Table(
    "trained_versions",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, nullable=False),
    Column("step_s", Float),
    Column("update_s", Float),
)

# Number of groups of a step by the digest of their hooks (kind `hook`) or their job (kind `job`).
STEP_DIGESTS = Table(
    "step_digests",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("kind", String, primary_key=True),
    Column("digest", String, primary_key=True),
    Column("num", Integer, nullable=False),
)

# Number of groups of a run by the digest of their hooks or their job.
RUN_DIGESTS = Table(
    "run_digests",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("digest", String, primary_key=True),
    Column("num", Integer, nullable=False),
)

# `newest_at` is the time at which the newest group of the run arrived.
RUN_COUNTERS = Table(
    "run_counters",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("newest_at", Float, nullable=False),
    Column("num_groups", Integer, nullable=False),
    Column("num_steps", Integer, nullable=False),
)

# A `SessionTotals` for each session.
SESSION_COUNTERS = Table(
    "session_counters",
    METADATA,
    Column("session_id", String, primary_key=True),
    Column("parent_session_id", String),
    Column("app_key", String),
    Column("turns", Integer),
    Column("num_groups", Integer, nullable=False),
    Column("seen_at", Float, nullable=False),
    Column("num_rewards", Integer, nullable=False),
    Column("reward_sum", Float, nullable=False),
    Column("first_group_id", String, nullable=False),
    Column("first_is_side", Boolean, nullable=False),
    Column("first_at", Float, nullable=False),
    Index("ix_session_counters_seen", "seen_at"),
)
