"""The tables of the ledger (the proxy's SQLite file) as SQLAlchemy objects. The module `migrations`
creates the tables in the file. The comments of columns are shown in the docs.

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
_GROUP_ID = "Id of the group."

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
    return Column("group_id", String, group, primary_key=True, comment=_GROUP_ID)


# `ix_groups_place` contains every column that a proxy reads at its start. Reading these columns
# from the table is slow, because in a row of the table they are stored after the whole request.
GROUP_ROWS = Table(
    "group_rows",
    METADATA,
    *_columns(GroupRecord),
    Column(
        "request_slices",
        String,
        comment=(
            "Slices of the request as `[[piece_id, start, length], …]`, in bytes; NULL if the "
            "request is in `request_json`."
        ),
    ),
    Column("request_digest", LargeBinary, comment="BLAKE2b digest of the whole request."),
    *_indexes(GroupRecord, "groups"),
    Index(
        "ix_groups_place",
        *("received_at", "group_id", "app_key", "session_id", "parent_session_id", "parent_id"),
        *("turn", "kind", "evidence", "asked_key", "response_id"),
    ),
    # This index has only the groups of sessions that were assigned to arms.
    Index("ix_groups_arm", "received_at", sqlite_where=text("arm_propensity IS NOT NULL")),
)
"""The rows of the view `groups`. `request_json` is empty in this table if the request is stored as
slices of pieces, so read requests from the view."""

SIBLING_ROWS = Table(
    "sibling_rows",
    METADATA,
    _group_id(),
    *_columns(SiblingRecord),
    Column(
        "text_at", Integer, comment="Character of the message at which the view inserts the text."
    ),
    Column(
        "tool_calls_at",
        Integer,
        comment="Character of the message at which the view inserts the tool calls.",
    ),
)
"""The rows of the view `siblings`. `message_json` has neither the text nor the tool calls in this
table, so read messages from the view."""


def _call_columns() -> list[Column[Any]]:
    """Return the columns of one LLM call as the engine saw it. The column for the group's id is not
    among them."""
    return [
        Column(
            "sibling",
            Integer,
            primary_key=True,
            autoincrement=False,
            comment="Index of the sibling.",
        ),
        Column(
            "seq",
            Integer,
            primary_key=True,
            autoincrement=False,
            comment="Index of the call among the calls of the sibling, from 0.",
        ),
        Column(
            "prompt_ids",
            LargeBinary,
            nullable=False,
            comment="Token ids of the prompt, as little-endian int32.",
        ),
        Column(
            "response_ids",
            LargeBinary,
            nullable=False,
            comment="Token ids of the response, as little-endian int32.",
        ),
        Column(
            "logprobs",
            LargeBinary,
            comment=(
                "Log-probabilities of the response's tokens, as little-endian float32; NULL if "
                "they are unknown."
            ),
        ),
        Column(
            "weight_versions_json",
            String,
            nullable=False,
            comment="Versions of the weights that sampled the tokens, as JSON.",
        ),
        Column(
            "weight_version",
            Integer,
            comment="Oldest version of the weights that sampled a token of the call.",
        ),
        Column("temperature", Float, nullable=False, comment="Sampling temperature."),
        Column(
            "finish_reason",
            String,
            comment="Reason why the answer ended, as the engine reported it.",
        ),
        Column(
            "untrainable",
            String,
            comment="Reason why the call cannot be trained; NULL if it can be.",
        ),
        Column(
            "shaped",
            Boolean,
            comment=(
                "Whether tokens were sampled from a restricted part of the vocabulary; NULL if "
                "this is not known."
            ),
        ),
        Column(
            "replica",
            String,
            comment=(
                "Name of the rollout replica that sampled the call; NULL if the server had one "
                "rollout engine, or if the replica is not known."
            ),
        ),
    ]


CALL_ROWS = Table(
    "call_rows",
    METADATA,
    _group_id(),
    *_call_columns(),
    Column(
        "prompt",
        Integer,
        comment="Row of the prompt in the table `prompts`; NULL if the prompt is in this row.",
    ),
    Column(
        "response_piece",
        Integer,
        comment="Row of the response in the table `pieces`; NULL if the response is in this row.",
    ),
    Index(
        "ix_calls_response_piece",
        "response_piece",
        sqlite_where=text("response_piece IS NOT NULL"),
    ),
)
"""The rows of the view `calls`. `prompt_ids` is empty in this table if the prompt is a row of the
table `prompts`, and `response_ids` is empty if the response is a piece. So read tokens from the
view."""

PROMPTS = Table(
    "prompts",
    METADATA,
    Column("prompt_id", Integer, primary_key=True, comment="Number of the row."),
    Column(
        "slices",
        String,
        nullable=False,
        comment="Slices of the prompt as `[[piece_id, start, length], …]`, in bytes.",
    ),
    Column("digest", LargeBinary, nullable=False, comment="BLAKE2b digest of the whole prompt."),
)
"""A long prompt. The calls of a group with the same prompt share the row."""

PIECES = Table(
    "pieces",
    METADATA,
    Column("piece_id", Integer, primary_key=True, comment="Number of the row."),
    Column("data", LargeBinary, nullable=False, comment="The bytes of the piece."),
)
"""A part of requests and prompts, or a response that the next prompt may repeat."""

GROUPS = Table("groups", VIEWS, *_columns(GroupRecord))
"""A request of an app, or a row of an evaluation, with what became of it (a view)."""
SIBLINGS = Table(
    "siblings", VIEWS, Column("group_id", String, comment=_GROUP_ID), *_columns(SiblingRecord)
)
"""An answer that was sampled for a request (a view)."""
CALLS = Table("calls", VIEWS, Column("group_id", String, comment=_GROUP_ID), *_call_columns())
"""An LLM call as the engine saw it: token ids, log-probabilities and weight versions (a view)."""

FEEDBACK = Table(
    "feedback",
    METADATA,
    *_columns(FeedbackRecord),
    *_indexes(FeedbackRecord, "feedback"),
    Index("ix_feedback_app", "app_key", "received_at"),
    # This index has only the edits that are to be trained.
    Index("ix_feedback_edit", "edit_state", sqlite_where=text("edit_state IS NOT NULL")),
)
"""Feedback on an answer, the value that it counts for, and what became of it."""

RESCORED = Table(
    "rescored",
    METADATA,
    _group_id(),
    Column("hook_hash", String, primary_key=True, comment="Content hash of the other hooks."),
    Column(
        "index", Integer, primary_key=True, autoincrement=False, comment="Index of the sibling."
    ),
    Column("reward", Float, comment="Reward by the other hooks; NULL if they gave none."),
    Column(
        "annotations_json",
        String,
        comment="Keys that the other hooks added to the answer, as JSON.",
    ),
    Column("reason", String, comment="Reason why there is no reward; NULL if there is one."),
    Column("scored_at", Float, nullable=False, comment="Time of the scoring, in Unix seconds."),
)
"""The reward of other hooks for a sibling, from `fakevllm rescore`."""

FORGOTTEN_GROUPS = Table(
    "forgotten_groups",
    METADATA,
    Column("group_id", String, primary_key=True, comment="Id of the group."),
    Column(
        "cause",
        String,
        nullable=False,
        comment="`forgotten` by `fakevllm forget`, or `pruned` by the retention settings.",
    ),
    Column("forgotten_at", Float, nullable=False, comment="Time of the deletion, in Unix seconds."),
    Column(
        "is_sent",
        Boolean,
        nullable=False,
        comment="Whether the server has deleted the captured calls of the group.",
    ),
    Index("ix_forgotten_unsent", "group_id", sqlite_where=text("NOT is_sent")),
)
"""A group whose contents were deleted by `fakevllm forget` or by the retention settings."""

LOOSE_PIECES = Table(
    "loose_pieces",
    METADATA,
    Column(
        "piece_id",
        Integer,
        primary_key=True,
        autoincrement=False,
        comment="Row of the piece in the table `pieces`.",
    ),
)
"""A piece that a forgotten group used, and whose bytes are not erased yet."""

KEPT_ANSWERS = Table(
    "kept_answers",
    METADATA,
    Column("group_id", String, primary_key=True, comment="Id of the group."),
    Column("key", LargeBinary, nullable=False),
    Column("until", Float, nullable=False),
    Column("status", Integer, nullable=False, comment="HTTP status of the response."),
    Column("headers_json", String, nullable=False, comment="Headers of the response, as JSON."),
    Column("body", LargeBinary, nullable=False),
)
"""An answer that is kept for a retry, because its app disconnected before it had all of it. The row
is deleted when a retry has received the answer, or when the time for retries is over. The row may
be written before the row of its group, so its group id is no foreign key."""

RESPONSES = Table(
    "responses",
    METADATA,
    Column("response_id", String, primary_key=True, comment="Id of the response."),
    Column(
        "owner",
        String,
        primary_key=True,
        comment="Fingerprint of the API key that made the response; empty without a key.",
    ),
    Column("group_id", String),
    Column("created_at", Float, nullable=False),
    Column("body", LargeBinary),
    Column(
        "deleted_at",
        Float,
        comment="Time of the deletion, in Unix seconds; NULL if the response was not deleted.",
    ),
)
"""A complete response of the Responses format, which its app can retrieve. The row may be written
before the row of its group, so its group id is no foreign key. The row of a deleted response
remains."""

TASKS = Table(
    "tasks",
    METADATA,
    Column("task_id", String, primary_key=True, comment="Id of the task."),
    Column("main_query", String, nullable=False, comment="Text of the task."),
    Column(
        "metadata_json",
        String,
        nullable=False,
        comment="Metadata of the task as JSON, such as the reference answer.",
    ),
    Column(
        "created_at", Float, nullable=False, comment="Time of the registration, in Unix seconds."
    ),
    Column(
        "owner",
        String,
        comment="Fingerprint of the API key that registered the task; NULL without a key.",
    ),
)
"""A dataset task that `fakevllm replay` registered."""

META = Table(
    "meta",
    METADATA,
    Column("key", String, primary_key=True, comment="Name of the fact."),
    Column("value", String, nullable=False, comment="The fact as text."),
)
"""Facts about the file, such as the positions in the server's run logs, and the salt by which
sessions are assigned to arms."""

COUNTERS = Table(
    "counters",
    METADATA,
    Column(
        "subject",
        String,
        primary_key=True,
        comment=(
            "What is counted: `state` (groups by state), `untrained` (groups by the slug of "
            "their reason), `failure` (siblings by failure), `feedback` (feedback by state), "
            "`forgotten` (groups without contents, by cause) or `tokens` (tokens of answers)."
        ),
    ),
    Column(
        "name",
        String,
        primary_key=True,
        comment=(
            "The state, slug or cause whose rows are counted. Tokens are `sampled`, `served` and "
            "`trained` for requests of apps, and `evaluated` if an evaluation sampled them."
        ),
    ),
    Column("num", Integer, nullable=False, comment="The number."),
)
"""A number that counts rows of the other tables."""

STEP_COUNTERS = Table(
    "step_counters",
    METADATA,
    Column(
        "run_id", String, primary_key=True, comment="Id of the run; empty if the run is unknown."
    ),
    Column(
        "step",
        Integer,
        primary_key=True,
        autoincrement=False,
        comment="Number of the training step.",
    ),
    Column("num_groups", Integer, nullable=False),
    Column("num_samples", Integer, nullable=False),
    Column("reward_sum", Float, nullable=False),
    Column("num_best", Integer, nullable=False),
    Column("best_sum", Float, nullable=False),
    Column("num_flat", Integer, nullable=False),
    Column("num_random", Integer, nullable=False),
    Column("random_sum", Float, nullable=False),
)
"""Counts and reward sums of a training step, for the learning curve."""

STEP_TOKENS = Table(
    "step_tokens",
    METADATA,
    Column(
        "run_id", String, primary_key=True, comment="Id of the run; empty if the run is unknown."
    ),
    Column(
        "step",
        Integer,
        primary_key=True,
        autoincrement=False,
        comment="Number of the training step.",
    ),
    Column("num_sampled", Integer, nullable=False, comment="Tokens of all siblings."),
    Column("num_served", Integer, nullable=False, comment="Tokens of the answers that apps got."),
    Column("num_trained", Integer, nullable=False, comment="Tokens of the trained answers."),
)
"""Numbers of tokens of a training step's answers. Unlike in `step_counters`, groups without a
reward count too."""

TRAINED_VERSIONS = Table(
    "trained_versions",
    METADATA,
    Column("run_id", String, primary_key=True, comment="Id of the run."),
    Column(
        "version",
        Integer,
        primary_key=True,
        autoincrement=False,
        comment="Version of the weights.",
    ),
    Column(
        "step",
        Integer,
        nullable=False,
        comment="Number of the training step that made the version.",
    ),
    Column(
        "step_s", Float, comment="Seconds since the step before; NULL if they were not measured."
    ),
    Column(
        "update_s",
        Float,
        comment="Seconds that the trainer needed; NULL if they were not measured.",
    ),
)
"""A version of the weights, and the training step that made it. The seconds are also NULL for steps
from before the ledger had this table."""

STEP_DIGESTS = Table(
    "step_digests",
    METADATA,
    Column(
        "run_id", String, primary_key=True, comment="Id of the run; empty if the run is unknown."
    ),
    Column(
        "step",
        Integer,
        primary_key=True,
        autoincrement=False,
        comment="Number of the training step.",
    ),
    Column("kind", String, primary_key=True, comment="`hook` for hook files, `job` for a job."),
    Column("digest", String, primary_key=True, comment="Digest of the hook files or of the job."),
    Column("num", Integer, nullable=False, comment="Number of groups."),
)
"""The number of groups of a training step by the digest of their hooks or of their job."""

RUN_DIGESTS = Table(
    "run_digests",
    METADATA,
    Column(
        "run_id", String, primary_key=True, comment="Id of the run; empty if the run is unknown."
    ),
    Column("kind", String, primary_key=True, comment="`hook` for hook files, `job` for a job."),
    Column("digest", String, primary_key=True, comment="Digest of the hook files or of the job."),
    Column("num", Integer, nullable=False, comment="Number of groups."),
)
"""The number of groups of a run by the digest of their hooks or of their job."""

RUN_COUNTERS = Table(
    "run_counters",
    METADATA,
    Column("run_id", String, primary_key=True, comment="Id of the run."),
    Column(
        "newest_at",
        Float,
        nullable=False,
        comment="Time at which the newest group of the run arrived, in Unix seconds.",
    ),
    Column("num_groups", Integer, nullable=False, comment="Number of groups."),
    Column("num_steps", Integer, nullable=False, comment="Number of training steps."),
)
"""Counts of a run."""

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
"""Counts of a session."""
