"""The changes to the journal. For each kind of change, a function returns a `Change`.

The docstring of such a function describes what happens when the writer thread applies the change.
Each change is applied within a single transaction. The label of a change also names a crash point,
at which tests end the server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Sequence
from typing import cast

from sqlalchemy import Connection

from fakevllm_adapters.protocol.swarm import LogEntry
from fakevllm_runtime.contents import MIN_BYTES
from fakevllm_server.episodes.episode_registry import Episode
from fakevllm_server.journal import reads
from fakevllm_server.journal.compression import compress_facts, compress_numbers
from fakevllm_server.journal.group_commit_writer import Change
from fakevllm_server.journal.prompts import forget_unused, recent_prompts
from fakevllm_server.journal.rows import (
    PRUNED,
    CallRows,
    PooledGroup,
    ReleaseRow,
    SavedCheckpoint,
    ScoredSample,
    Submission,
    TrainingReturn,
    groups_hash,
)
from fakevllm_server.journal.statements import execute, execute_many
from fakevllm_server.journal.tables import BatchState, EpisodeState, GroupState
from fakevllm_server.types.calls import RecordedCall

_CALL_ROWS = "call_rows"
"""Key in `Connection.info` under which the writing connection keeps its CallRows, which converts
calls to rows."""

# --- episodes


def claimed(episode: Episode) -> Change:
    """Store a new claim of an episode. The new claim replaces the earlier claim of the same
    episode."""
    idempotency = episode.idempotency
    row = (
        episode.episode_id,
        episode.epoch,
        EpisodeState.CLAIMED,
        episode.kind,
        episode.client_uuid,
        episode.key,
        episode.idle_limit_s,
        episode.owner,
        "" if idempotency is None else idempotency.key,
        b"" if idempotency is None else idempotency.body_hash,
    )

    def apply(db: Connection) -> None:
        marks = ", ".join("?" * len(row))
        db.exec_driver_sql(f"INSERT OR REPLACE INTO episodes VALUES ({marks})", row)

    return Change("claim", apply)


def reopened(episodes: Sequence[Episode]) -> Change:
    """Return episodes to the open state, in which clients can claim them. Use this change if the
    claim of an episode was aborted, given up or expired. Delete the captured calls of these claims.
    """

    def apply(db: Connection) -> None:
        for episode in episodes:
            move_episode(db, episode.episode_id, EpisodeState.OPEN)
            db.exec_driver_sql("DELETE FROM calls WHERE owner = ?", (episode.uuid,))

    return Change("reopen", apply)


def call_recorded(owner: str, seq: int, call: RecordedCall, group_id: str | None = None) -> Change:
    """Store a captured model call as call number `seq` of its owner, which is a sibling or an
    episode."""
    return Change("call", lambda db: put_call(db, owner, seq, call, group_id))


def episode_ended(
    episode_id: str,
    sample: ScoredSample,
    group: PooledGroup | None,
    members: Sequence[ScoredSample],
    submission: Submission,
    evaluated: LogEntry | None = None,
) -> Change:
    """Store the end of a claimed episode, with its reward.

    If the episode completed the group of its task, `group` is this group. `members` are then all
    samples of the group, including this episode. If the episode was an evaluation, `evaluated` is
    the entry for the run log.
    """

    def apply(db: Connection) -> None:
        move_episode(db, episode_id, EpisodeState.ENDED)
        put_samples(db, [sample], None)
        put_submission(db, submission)
        if group is not None:
            complete_group(db, group, members)
        if evaluated is not None:
            put_entry(db, evaluated)

    return Change("end_episode", apply)


def task_completed(group: PooledGroup, members: Sequence[ScoredSample]) -> Change:
    """Store the group of a task for which no more episodes are expected."""
    return Change("complete", lambda db: complete_group(db, group, members))


# --- groups


def group_ended(
    group: PooledGroup,
    samples: Sequence[ScoredSample],
    submission: Submission,
    calls: Sequence[Sequence[RecordedCall]] = (),
) -> Change:
    """Store an ended group with its samples and rewards. `calls` has the model calls of each sample
    that are not in the journal yet.

    The group is one of four kinds. A passive group has the answers to one request of an app, and
    its calls were stored when they were made. A feedback sample is a group of one answer that is
    trained again because of later feedback. A user's edit has one sample without a reward for each
    demonstration. A logged group is a group of an earlier run.
    """

    def apply(db: Connection) -> None:
        for sample, own in zip(samples, calls, strict=False):
            for seq, call in enumerate(own):
                put_call(db, sample.owner, seq, call, group.group_id)
        put_samples(db, samples, group.group_id)
        delete_unscored(db, group.group_id)
        put_group(db, group)
        put_submission(db, submission)
        if group.state is not GroupState.POOLED:
            delete_calls(db, [group.group_id])

    return Change("end_group", apply)


def group_aborted(group_id: str) -> Change:
    """Mark an open group as dropped with the reason `aborted`, and delete its captured calls."""
    group = PooledGroup(group_id, GroupState.DROPPED, "aborted")

    def apply(db: Connection) -> None:
        put_group(db, group)
        delete_calls(db, [group_id])

    return Change("abort_group", apply)


def dropped(entry: LogEntry) -> Change:
    """Mark all groups in `entry.reasons` as dropped, each with its reason. Delete the captured
    calls of these groups, and store the log entry."""

    def apply(db: Connection) -> None:
        for group_id, reason in entry.reasons.items():
            put_group(db, PooledGroup(group_id, GroupState.DROPPED, reason))
        delete_calls(db, entry.reasons)
        put_entry(db, entry)

    return Change("drop", apply)


# --- steps


def planned(step: int, version: int, group_ids: Sequence[str]) -> Change:
    """Store the batch that a step will train. `version` is the version of the weights before the
    step."""

    def apply(db: Connection) -> None:
        row = (step, version, groups_hash(group_ids), BatchState.PLANNED)
        db.exec_driver_sql("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?)", row)
        for position, group_id in enumerate(group_ids):
            db.exec_driver_sql(
                "UPDATE groups SET state = ?, step = ?, position = ? WHERE group_id = ?",
                (GroupState.PLANNED, step, position, group_id),
            )

    return Change("plan", apply)


def unplanned(step: int) -> Change:
    """Delete the stored batch of a step that could not be trained.

    The groups of the batch are not changed. To drop the groups, use the change `dropped`.
    """
    return Change(
        "unplan", lambda db: db.exec_driver_sql("DELETE FROM batches WHERE step = ?", (step,))
    )


def trained(entry: LogEntry, checkpoint: SavedCheckpoint | None) -> Change:
    """Store that a step and its groups were trained. If the step saved a checkpoint, store the
    checkpoint too."""

    def apply(db: Connection) -> None:
        update_batch = "UPDATE batches SET state = ? WHERE step = ?"
        db.exec_driver_sql(update_batch, (BatchState.DONE, entry.step))
        update_groups = "UPDATE groups SET state = ? WHERE step = ? AND state = ?"
        db.exec_driver_sql(update_groups, (GroupState.CONSUMED, entry.step, GroupState.PLANNED))
        put_entry(db, entry)
        if checkpoint is not None:
            put_checkpoint(db, checkpoint)

    return Change("train", apply)


def saved(checkpoint: SavedCheckpoint) -> Change:
    """Store a checkpoint."""
    return Change("save", lambda db: put_checkpoint(db, checkpoint))


def pruned(steps: Iterable[int], last_step: int) -> Change:
    """Delete the checkpoints of `steps` from the journal. Also delete the captured calls of the
    steps up to `last_step`. These steps are never trained again, even if training goes back to an
    older checkpoint."""
    rows = [(step,) for step in steps]

    def apply(db: Connection) -> None:
        for row in rows:
            db.exec_driver_sql("DELETE FROM checkpoints WHERE step = ?", row)
        delete_trained_calls(db, last_step)

    return Change("prune", apply)


def rolled_back(entry: LogEntry) -> Change:
    """Roll the run back to the end of the step in `entry`. The batches and groups of later steps
    become planned again, because they will be trained again.

    The checkpoints of later steps are deleted.
    """

    def apply(db: Connection) -> None:
        db.exec_driver_sql(
            "UPDATE batches SET state = ? WHERE step > ?", (BatchState.PLANNED, entry.step)
        )
        db.exec_driver_sql(
            "UPDATE groups SET state = ? WHERE step > ? AND state = ?",
            (GroupState.PLANNED, entry.step, GroupState.CONSUMED),
        )
        db.exec_driver_sql("DELETE FROM checkpoints WHERE step > ?", (entry.step,))
        put_entry(db, entry)

    return Change("roll_back", apply)


def abandoned(entry: LogEntry, kept: Collection[int] = ()) -> Change:
    """Roll the run back to the end of the step in `entry`, and discard all later steps for good.
    Delete the batches and checkpoints of the later steps. Only the checkpoints of the versions in
    `kept` are kept, as side checkpoints (checkpoints of versions that are not part of the run).

    The groups in `entry.lost` are dropped with the reason `entry.reason`.
    """

    def apply(db: Connection) -> None:
        keep_beside(db, entry.step, kept)
        abandon(db, entry, entry.step)

    return Change("abandon", apply)


# --- releases


def release_decided(row: ReleaseRow) -> Change:
    """Append a decision to the history of releases. The decision has no other effect on the
    journal."""
    return Change("release", lambda db: put_release(db, row))


def went_back(entry: LogEntry, row: ReleaseRow, back: TrainingReturn) -> Change:
    """Append a decision to the history of releases, and let training go back to an earlier version.
    To do so, discard all steps after `back.common_step`, in the same way as `abandoned`.

    The checkpoints of the versions in `back.kept` are kept as side checkpoints (checkpoints of
    versions that are not part of the run). All other side checkpoints are deleted.
    """
    kept = json.dumps(sorted(back.kept))

    def apply(db: Connection) -> None:
        put_release(db, row)
        keep_beside(db, back.common_step, back.kept)
        abandon(db, entry, back.common_step)
        if back.step > back.common_step:
            db.exec_driver_sql(
                "INSERT OR REPLACE INTO checkpoints "
                "SELECT step, folder, version, digest, reward_mean, at FROM side_checkpoints "
                "WHERE version = ?",
                (back.version,),
            )
            # The batches between the two steps belong to the versions that training leaves now, so
            # no earlier checkpoint can be followed by the steps up to this one.
            delete_trained_calls(db, back.step)
        db.exec_driver_sql(
            "DELETE FROM side_checkpoints WHERE version NOT IN (SELECT value FROM json_each(?)) "
            "OR version IN (SELECT version FROM checkpoints)",
            (kept,),
        )

    return Change("go_back", apply)


def published(version: int, step: int) -> Change:
    """Store that the weights of a training step are served under the version number `version`."""
    row = (version, step, time.time())
    insert = "INSERT OR IGNORE INTO publications VALUES (?, ?, ?)"
    return Change("publish", lambda db: db.exec_driver_sql(insert, row))


def entry_logged(entry: LogEntry) -> Change:
    """Store an entry of the run log. The entry has no other effect on the journal."""
    return Change("log", lambda db: put_entry(db, entry))


def meta_set(key: str, value: str | None) -> Change:
    """Store a fact about the run under a key of the table `meta`. The value None deletes the
    fact."""
    return Change("meta", lambda db: put_meta(db, key, value))


# --- the SQL of the changes, one function for each kind of row


def keep_beside(db: Connection, step: int, versions: Collection[int]) -> None:
    """Copy checkpoints to the side checkpoints (checkpoints of versions that are not part of the
    run). Copy the checkpoints of `versions` whose step is after `step`."""
    db.exec_driver_sql(
        "INSERT OR REPLACE INTO side_checkpoints "
        "SELECT version, step, folder, digest, reward_mean, at FROM checkpoints "
        "WHERE step > ? AND version IN (SELECT value FROM json_each(?))",
        (step, json.dumps(sorted(versions))),
    )


def abandon(db: Connection, entry: LogEntry, step: int) -> None:
    """Discard the steps after `step`, and drop the groups of these steps. `entry.lost` has the ids
    of these groups."""
    db.exec_driver_sql("DELETE FROM batches WHERE step > ?", (step,))
    db.exec_driver_sql("DELETE FROM checkpoints WHERE step > ?", (step,))
    for group_id in entry.lost:
        put_group(db, PooledGroup(group_id, GroupState.DROPPED, entry.reason))
    delete_calls(db, entry.lost)
    # Steps from here on can be trained again, although steps with these numbers were pruned.
    put_meta(db, PRUNED, str(min(reads.last_pruned(db), entry.step)))
    put_entry(db, entry)


def delete_trained_calls(db: Connection, step: int) -> None:
    """Delete the captured calls of the steps up to `step`. These steps can then not be trained
    again."""
    pruned = reads.last_pruned(db)
    db.exec_driver_sql(
        "DELETE FROM calls WHERE owner IN (SELECT s.owner FROM groups g JOIN samples s "
        "ON s.group_id = g.group_id WHERE g.state = ? AND g.step <= ? AND g.step > ?)",
        (GroupState.CONSUMED, step, pruned),
    )
    # Never lower this: a kept checkpoint may be much older than the deleted ones.
    put_meta(db, PRUNED, str(max(pruned, step)))


def put_release(db: Connection, row: ReleaseRow) -> None:
    record = row.record
    values = (
        record.number,
        record.id,
        row.request_hash,
        record.decision,
        record.version,
        record.parent,
        row.newest,
        row.restored,
        row.is_rollback,
        json.dumps(None if row.pinned is None else list(row.pinned)),
        record.time_s,
        record.decided_by,
        json.dumps(record.evidence),
    )
    marks = ", ".join("?" * len(values))
    db.exec_driver_sql(f"INSERT INTO releases VALUES ({marks})", values)


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
    rows = cast(CallRows, db.info.setdefault(_CALL_ROWS, CallRows()))
    prompt_ids, response_ids, logprobs, facts, digest = rows.row(call)
    prompt_id = None
    if len(prompt_ids) >= MIN_BYTES:
        prompt_id = recent_prompts(db).put(db, prompt_ids, group_id or owner)
        prompt_ids = b""
    insert = (
        "INSERT OR IGNORE INTO calls (owner, group_id, seq, prompt, prompt_ids, response_ids, "
        "logprobs, facts_json, digest, is_compressed) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1)"
    )
    compressed = (
        compress_numbers(prompt_ids) if prompt_ids else b"",
        compress_numbers(response_ids),
        None if logprobs is None else compress_numbers(logprobs),
        compress_facts(facts),
    )
    row = (owner, group_id, seq, prompt_id, *compressed, digest)
    if execute(db, insert, row).rowcount == 0 and prompt_id is not None:
        forget_unused(db, prompt_id)


def put_samples(db: Connection, samples: Sequence[ScoredSample], group_id: str | None) -> None:
    rows = [
        (sample.owner, group_id, sample.task_id, sample.index, sample.reward) for sample in samples
    ]
    execute_many(db, "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?)", rows)


def put_group(db: Connection, group: PooledGroup) -> None:
    """Insert a row for a group. If the group already has a row, change only the row's state and
    reason."""
    put = (
        "INSERT INTO groups "
        "(group_id, state, reason, advantage, hook_hash, demonstrates, is_logged) "
        "VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (group_id) DO UPDATE SET state = excluded.state, reason = excluded.reason"
    )
    values = (group.group_id, group.state, group.reason, group.advantage)
    execute(db, put, (*values, group.hook_hash, group.demonstrates, group.is_logged))


def complete_group(db: Connection, group: PooledGroup, members: Sequence[ScoredSample]) -> None:
    """Store the group of a task, and assign the samples in `members` to the group.

    If the group is not pooled, its captured calls are deleted. A pooled group is kept for training.
    """
    put_group(db, group)
    for sample in members:
        row = (group.group_id, sample.index, sample.owner)
        db.exec_driver_sql('UPDATE samples SET group_id = ?, "index" = ? WHERE owner = ?', row)
    if group.state is not GroupState.POOLED:
        delete_calls(db, [group.group_id])


def delete_calls(db: Connection, group_ids: Iterable[str]) -> None:
    for group_id in group_ids:
        db.exec_driver_sql(
            "DELETE FROM calls WHERE group_id = ? OR owner IN "
            "(SELECT owner FROM samples WHERE group_id = ?)",
            (group_id, group_id),
        )


def delete_unscored(db: Connection, group_id: str) -> None:
    """Delete the captured calls of siblings for which the group has no sample. These siblings were
    missing in the request that ended the group."""
    db.exec_driver_sql(
        "DELETE FROM calls WHERE group_id = ? AND owner NOT IN "
        "(SELECT owner FROM samples WHERE group_id = ?)",
        (group_id, group_id),
    )


def put_submission(db: Connection, submission: Submission) -> None:
    row = (submission.key, submission.body_hash, submission.reply_json, time.time())
    execute(db, "INSERT INTO submissions VALUES (?, ?, ?, ?)", row)


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
