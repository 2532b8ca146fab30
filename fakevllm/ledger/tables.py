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

_SQL_TYPES = {str: String, int: Integer, float: Float, bool: Boolean}


def _columns(record: type[GroupRecord | SiblingRecord | FeedbackRecord]) -> list[Column[Any]]:
    """Return the SQL columns for a record class: one column, with the same name, for each field
    that is stored in the table. A field of type `X | None` becomes a nullable column."""
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
        index=record_field.metadata.get("index"),
        nullable=is_nullable,
        server_default=None if server_default is None else text(server_default),
    )


def _group_id() -> Column[str]:
    group = ForeignKey("groups.group_id", ondelete="CASCADE")
    return Column("group_id", String, group, primary_key=True)


# `ix_groups_place` contains every column that a proxy reads at its start. Reading these columns
# from the table is slow, because in a row of the table they are stored after the whole request.
GROUPS = Table(
    "groups",
    METADATA,
    *_columns(GroupRecord),
    Index(
        "ix_groups_place",
        *("received_at", "group_id", "app_key", "session_id", "parent_session_id", "parent_id"),
        *("turn", "kind", "evidence", "asked_key", "response_id"),
    ),
)

SIBLINGS = Table("siblings", METADATA, _group_id(), *_columns(SiblingRecord))

# One LLM call as the engine saw it. The blobs are arrays of little-endian int32 or float32.
# `weight_version` is the oldest weight version that sampled a token of the call. `shaped` says
# whether tokens were chosen from less than the vocabulary by more than a mask. It is NULL if that
# is not known.
CALLS = Table(
    "calls",
    METADATA,
    _group_id(),
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
)

FEEDBACK = Table(
    "feedback",
    METADATA,
    *_columns(FeedbackRecord),
    Index("ix_feedback_app", "app_key", "received_at"),
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
