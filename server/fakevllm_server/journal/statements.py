"""The SQL that changes are made of, one function for each kind of row."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection

from fakevllm_adapters.protocol.swarm import LogEntry
from fakevllm_server.calls import RecordedCall
from fakevllm_server.journal.facts import (
    PooledGroup,
    SavedCheckpoint,
    ScoredSample,
    Submission,
)
from fakevllm_server.journal.rows import CALL_COLUMNS, call_row
from fakevllm_server.journal.tables import EpisodeState, GroupState


def put_meta(db: Connection, key: str, value: str | None) -> None:
    if value is None:
        db.exec_driver_sql('DELETE FROM meta WHERE "key" = ?', (key,))
    else:
        db.exec_driver_sql("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def move_episode(db: Connection, episode_id: str, state: EpisodeState) -> None:
    update = "UPDATE episodes SET state = ? WHERE episode_id = ?"
    db.exec_driver_sql(update, (state, episode_id))


def put_call(
    db: Connection, owner: str, seq: int, call: RecordedCall, group_id: str | None
) -> None:
    insert = (
        f"INSERT OR IGNORE INTO calls (owner, group_id, seq, {CALL_COLUMNS}) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    )
    db.exec_driver_sql(insert, (owner, group_id, seq, *call_row(call)))


def put_sample(db: Connection, sample: ScoredSample, group_id: str | None) -> None:
    row = (sample.owner, group_id, sample.task_id, sample.index, sample.reward)
    db.exec_driver_sql("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?)", row)


def put_group(db: Connection, group: PooledGroup) -> None:
    """An id has one row: where it is there, it is the state that changes."""
    put = (
        "INSERT INTO groups (group_id, state, reason, advantage) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (group_id) DO UPDATE SET state = excluded.state, reason = excluded.reason"
    )
    db.exec_driver_sql(put, (group.group_id, group.state, group.reason, group.advantage))


def complete(db: Connection, group: PooledGroup, members: Sequence[ScoredSample]) -> None:
    put_group(db, group)
    for one in members:
        row = (group.group_id, one.index, one.owner)
        db.exec_driver_sql('UPDATE samples SET group_id = ?, "index" = ? WHERE owner = ?', row)
    if group.state is not GroupState.POOLED:
        forget_calls(db, [group.group_id])


def forget_calls(db: Connection, group_ids: Iterable[str]) -> None:
    for group_id in group_ids:
        db.exec_driver_sql(
            "DELETE FROM calls WHERE group_id = ? OR owner IN "
            "(SELECT owner FROM samples WHERE group_id = ?)",
            (group_id, group_id),
        )


def forget_unscored(db: Connection, group_id: str) -> None:
    """Calls of siblings beyond those that have ended with their group."""
    db.exec_driver_sql(
        "DELETE FROM calls WHERE group_id = ? AND owner NOT IN "
        "(SELECT owner FROM samples WHERE group_id = ?)",
        (group_id, group_id),
    )


def put_submission(db: Connection, submission: Submission) -> None:
    row = (submission.key, submission.body_hash, submission.reply_json, time.time())
    db.exec_driver_sql("INSERT INTO submissions VALUES (?, ?, ?, ?)", row)


def put_checkpoint(db: Connection, saved: SavedCheckpoint) -> None:
    row = (saved.step, saved.folder, saved.version, saved.digest, saved.reward_mean, time.time())
    db.exec_driver_sql("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)", row)


def put_entry(db: Connection, entry: LogEntry) -> None:
    row = (
        entry.seq,
        entry.kind,
        entry.step,
        entry.version,
        entry.model_dump_json(exclude_defaults=True),
    )
    db.exec_driver_sql("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", row)
