"""Everything that is ever written to the journal: one function for each kind of change, all of it
in one transaction."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection

from fakevllm_adapters.protocol.swarm import LogEntry
from fakevllm_server.episodes.registry import Episode
from fakevllm_server.journal import reads
from fakevllm_server.journal.rows import (
    CALL_COLUMNS,
    PRUNED,
    PooledGroup,
    SavedCheckpoint,
    ScoredSample,
    Submission,
    call_row,
    groups_hash,
)
from fakevllm_server.journal.tables import BatchState, EpisodeState, GroupState
from fakevllm_server.journal.writer import Change
from fakevllm_server.types.calls import RecordedCall

# --- episodes


def claimed(episode: Episode) -> Change:
    again = episode.idempotency
    row = (
        episode.episode_id,
        episode.epoch,
        EpisodeState.CLAIMED,
        episode.kind,
        episode.client_uuid,
        episode.key,
        episode.idle_limit_s,
        episode.owner,
        "" if again is None else again.key,
        b"" if again is None else again.body_hash,
    )

    def make(db: Connection) -> None:
        places = ", ".join("?" * len(row))
        db.exec_driver_sql(f"INSERT OR REPLACE INTO episodes VALUES ({places})", row)

    return Change("claim", make)


def reopened(episodes: Sequence[Episode]) -> Change:
    """Their claims were given up or ran out."""

    def make(db: Connection) -> None:
        for episode in episodes:
            move_episode(db, episode.episode_id, EpisodeState.OPEN)
            db.exec_driver_sql("DELETE FROM calls WHERE owner = ?", (episode.uuid,))

    return Change("reopen", make)


def call_ended(owner: str, seq: int, call: RecordedCall, group_id: str | None = None) -> Change:
    return Change("call", lambda db: put_call(db, owner, seq, call, group_id))


def episode_ended(
    episode_id: str,
    sample: ScoredSample,
    group: PooledGroup | None,
    members: Sequence[ScoredSample],
    submission: Submission,
    evaluated: LogEntry | None = None,
) -> Change:
    """`members`: all of its group, where it completed one. `evaluated`: what the log tells of it,
    where it is told."""

    def make(db: Connection) -> None:
        move_episode(db, episode_id, EpisodeState.ENDED)
        put_sample(db, sample, None)
        put_submission(db, submission)
        if group is not None:
            complete(db, group, members)
        if evaluated is not None:
            put_entry(db, evaluated)

    return Change("end_episode", make)


def task_completed(group: PooledGroup, members: Sequence[ScoredSample]) -> Change:
    return Change("complete", lambda db: complete(db, group, members))


# --- groups


def group_ended(
    group: PooledGroup,
    samples: Sequence[ScoredSample],
    submission: Submission,
    calls: Sequence[RecordedCall] = (),
) -> Change:
    """`calls`: of a feedback sample, which brings its own."""

    def make(db: Connection) -> None:
        for seq, call in enumerate(calls):
            put_call(db, samples[0].owner, seq, call, group.group_id)
        for sample in samples:
            put_sample(db, sample, group.group_id)
        forget_unscored(db, group.group_id)
        put_group(db, group)
        put_submission(db, submission)
        if group.state is not GroupState.POOLED:
            forget_calls(db, [group.group_id])

    return Change("end_group", make)


def group_aborted(group_id: str) -> Change:
    group = PooledGroup(group_id, GroupState.DROPPED, "aborted")

    def make(db: Connection) -> None:
        put_group(db, group)
        forget_calls(db, [group_id])

    return Change("abort_group", make)


def dropped(entry: LogEntry) -> Change:
    """The groups of an entry of this kind, for its reasons."""

    def make(db: Connection) -> None:
        for group_id, reason in entry.reasons.items():
            put_group(db, PooledGroup(group_id, GroupState.DROPPED, reason))
        forget_calls(db, entry.reasons)
        put_entry(db, entry)

    return Change("drop", make)


# --- steps


def planned(step: int, version: int, group_ids: Sequence[str]) -> Change:
    def make(db: Connection) -> None:
        row = (step, version, groups_hash(group_ids), BatchState.PLANNED)
        db.exec_driver_sql("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?)", row)
        for position, group_id in enumerate(group_ids):
            db.exec_driver_sql(
                "UPDATE groups SET state = ?, step = ?, position = ? WHERE group_id = ?",
                (GroupState.PLANNED, step, position, group_id),
            )

    return Change("plan", make)


def unplanned(step: int) -> Change:
    """A batch that no trainer took; its groups are dropped beside."""
    return Change(
        "unplan", lambda db: db.exec_driver_sql("DELETE FROM batches WHERE step = ?", (step,))
    )


def trained(entry: LogEntry, checkpoint: SavedCheckpoint | None) -> Change:
    """Step, consumed samples and checkpoint: all of them or none."""

    def make(db: Connection) -> None:
        done = "UPDATE batches SET state = ? WHERE step = ?"
        db.exec_driver_sql(done, (BatchState.DONE, entry.step))
        consumed = "UPDATE groups SET state = ? WHERE step = ? AND state = ?"
        db.exec_driver_sql(consumed, (GroupState.CONSUMED, entry.step, GroupState.PLANNED))
        put_entry(db, entry)
        if checkpoint is not None:
            put_checkpoint(db, checkpoint)

    return Change("train", make)


def saved(checkpoint: SavedCheckpoint) -> Change:
    return Change("save", lambda db: put_checkpoint(db, checkpoint))


def pruned(steps: Iterable[int], oldest_kept: int) -> Change:
    """Checkpoints that are gone, and the calls that none of those kept can need again."""
    rows = [(step,) for step in steps]

    def make(db: Connection) -> None:
        for row in rows:
            db.exec_driver_sql("DELETE FROM checkpoints WHERE step = ?", row)
        db.exec_driver_sql(
            "DELETE FROM calls WHERE owner IN (SELECT s.owner FROM groups g JOIN samples s "
            "ON s.group_id = g.group_id WHERE g.state = ? AND g.step <= ? AND g.step > ?)",
            (GroupState.CONSUMED, oldest_kept, reads.last_pruned(db)),
        )
        # Never back: among the kept there may be one from long before what was let go.
        put_meta(db, PRUNED, str(max(reads.last_pruned(db), oldest_kept)))

    return Change("prune", make)


def rolled_back(entry: LogEntry) -> Change:
    """The trainer stands at the end of the entry's step: what was trained since is planned as it
    was."""

    def make(db: Connection) -> None:
        db.exec_driver_sql(
            "UPDATE batches SET state = ? WHERE step > ?", (BatchState.PLANNED, entry.step)
        )
        db.exec_driver_sql(
            "UPDATE groups SET state = ? WHERE step > ? AND state = ?",
            (GroupState.PLANNED, entry.step, GroupState.CONSUMED),
        )
        db.exec_driver_sql("DELETE FROM checkpoints WHERE step > ?", (entry.step,))
        put_entry(db, entry)

    return Change("roll_back", make)


def abandoned(entry: LogEntry) -> Change:
    """The trainer stands at the end of the entry's step, and what was trained since stays undone:
    its groups are told as lost, for the entry's reason."""

    def make(db: Connection) -> None:
        db.exec_driver_sql("DELETE FROM batches WHERE step > ?", (entry.step,))
        db.exec_driver_sql("DELETE FROM checkpoints WHERE step > ?", (entry.step,))
        for group_id in entry.lost:
            put_group(db, PooledGroup(group_id, GroupState.DROPPED, entry.reason))
        forget_calls(db, entry.lost)
        # What is trained from here on can be made again, though such steps were pruned before.
        put_meta(db, PRUNED, str(min(reads.last_pruned(db), entry.step)))
        put_entry(db, entry)

    return Change("abandon", make)


def published(version: int, step: int) -> Change:
    row = (version, step, time.time())
    insert = "INSERT OR IGNORE INTO publications VALUES (?, ?, ?)"
    return Change("publish", lambda db: db.exec_driver_sql(insert, row))


def logged(entry: LogEntry) -> Change:
    """An entry that changes nothing else."""
    return Change("log", lambda db: put_entry(db, entry))


def remembered(key: str, value: str | None) -> Change:
    """A fact of the run; None forgets it."""
    return Change("meta", lambda db: put_meta(db, key, value))


# The SQL that changes are made of, one function for each kind of row.


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
