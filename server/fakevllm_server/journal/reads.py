"""Queries of the journal: acknowledged work that is not trained yet, the run log, single rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from fakevllm_adapters.protocol.forgetting import FORGOTTEN
from fakevllm_adapters.protocol.releases import ReleaseRecord
from fakevllm_adapters.protocol.swarm import LogEntry, SiblingRef, parse_sibling
from fakevllm_server.episodes.episode_registry import ID_CHARS, Episode, Idempotency
from fakevllm_server.journal.call_reads import CALL_COLUMNS, CallReader
from fakevllm_server.journal.rows import (
    ANSWERING,
    PRUNED,
    TRAINING_LIMIT,
    CorruptCall,
    ReleaseRow,
    SavedCheckpoint,
    ScoredSample,
    Submission,
    VersionChange,
    groups_hash,
)
from fakevllm_server.journal.statements import execute
from fakevllm_server.journal.tables import BatchState, EpisodeState, GroupState
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode

log = logging.getLogger("fakevllm.server")

CORRUPT = "corrupt"
"""Reason for dropping a group with a corrupt call: a call that does not match its stored digest."""


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The groups that a training step uses, in order, and the version of the weights before the
    step."""

    step: int
    version: int
    groups: Sequence[FinishedGroup]
    is_whole: bool = True
    """Whether `groups` has all groups of the planned batch. False if corrupt or forgotten groups
    were left out."""


@dataclass(slots=True)
class PendingWork:
    """All work that the server had acknowledged before a restart, and had not trained yet: claimed
    episodes, open groups, samples (ended episodes) and pooled groups, with their captured calls."""

    claimed: list[Episode] = field(default_factory=list[Episode])
    """Claimed episodes, with their calls."""
    open_episodes: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Id and epoch of each episode that no client has claimed at present. The epoch is the number
    of the episode's latest claim."""
    open_groups: dict[str, dict[int, list[RecordedCall]]] = field(
        default_factory=dict[str, dict[int, list[RecordedCall]]]
    )
    """Calls of the groups that have not ended, by group id and by sibling index (the number of the
    answer in the group)."""
    samples: list[tuple[ScoredSample, list[RecordedCall]]] = field(
        default_factory=list[tuple[ScoredSample, list[RecordedCall]]]
    )
    """Ended episodes that wait for further episodes of their task, each with its calls."""
    groups: list[FinishedGroup] = field(default_factory=list[FinishedGroup])
    """Pooled groups (complete groups that wait for training), in order of arrival."""
    corrupt: list[str] = field(default_factory=list[str])
    """Ids of groups with a corrupt call."""
    corrupt_claims: list[Episode] = field(default_factory=list[Episode])
    """Claimed episodes with a corrupt call."""
    corrupt_samples: list[ScoredSample] = field(default_factory=list[ScoredSample])
    """Ended episodes that wait for further episodes of their task, and have a corrupt call."""


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The position at the end of the run log (the log of trained steps and dropped groups): the
    number of the last entry, the number of the last step, and the highest weight version."""

    last_seq: int
    version: int
    """Highest version that was ever published or appears in the run log."""
    last_step: int


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The training step and the version of the weights that the rollout engine serves."""

    version: int = 0
    step: int = 0
    """Step that made these weights."""


def pending_work(db: Connection, now: float) -> PendingWork:
    """Read all acknowledged work that is not trained yet.

    The idle time of a claim from before the restart begins at `now`. Therefore such a claim does
    not expire at once.
    """
    pending = PendingWork()
    calls = CallReader(db)
    claimed = (
        'SELECT episode_id, epoch, "key", client_uuid, kind, idle_limit_s, owner, '
        "idempotency_key, body_hash FROM episodes WHERE state = ?"
    )
    for *row, owner, key, body_hash in _rows(db, claimed, EpisodeState.CLAIMED):
        idempotency = Idempotency(key, body_hash) if key else None
        episode = Episode(*row, last_activity=now, owner=owner, idempotency=idempotency)
        try:
            episode.calls.extend(calls.of_owner(episode.uuid))
        except CorruptCall:
            pending.corrupt_claims.append(episode)
        else:
            pending.claimed.append(episode)
    opened = "SELECT episode_id, epoch FROM episodes WHERE state = ? ORDER BY rowid"
    pending.open_episodes = [(row[0], row[1]) for row in _rows(db, opened, EpisodeState.OPEN)]
    _read_open_groups(db, calls, pending)
    for row in _rows(
        db,
        'SELECT owner, "index", reward, task_id FROM samples WHERE group_id IS NULL ORDER BY rowid',
    ):
        sample = ScoredSample(*row)
        try:
            pending.samples.append((sample, calls.of_owner(sample.owner)))
        except CorruptCall:
            pending.corrupt_samples.append(sample)
    pooled = "SELECT group_id FROM groups WHERE state = ? ORDER BY seq"
    ids = [row[0] for row in _rows(db, pooled, GroupState.POOLED)]
    pending.groups = list(_groups(db, calls, ids, pending.corrupt))
    return pending


def waiting_clients(db: Connection) -> list[str]:
    """Return the uuids of clients with ended episodes that wait to be trained.

    Clients that only aborted episodes are not included, and neither are clients whose groups were
    all dropped.
    """
    ended_by = f"JOIN episodes e ON e.episode_id = substr(s.owner, 1, {ID_CHARS})"
    query = (
        f"SELECT e.client_uuid FROM samples s {ended_by} WHERE s.group_id IS NULL "
        "UNION SELECT e.client_uuid FROM groups g JOIN samples s ON s.group_id = g.group_id "
        f"{ended_by} WHERE g.state = ?"
    )
    return [row[0] for row in db.exec_driver_sql(query, (GroupState.POOLED,))]


def planned_batches(db: Connection, corrupt: list[str]) -> list[PlannedBatch]:
    """Return the batches that were planned for a training step and are not trained yet, oldest
    first.

    Groups with a corrupt call are left out of the batches. Their ids are appended to the list
    `corrupt`. Forgotten groups are left out too (see `forgotten_groups`).
    """
    batches: list[PlannedBatch] = []
    calls = CallReader(db)
    query = "SELECT step, version, groups_hash FROM batches WHERE state = ? ORDER BY step"
    for step, version, expected in _rows(db, query, BatchState.PLANNED):
        members = (
            "SELECT group_id FROM groups WHERE step = ? AND state = ? AND reason IS NOT ? "
            "ORDER BY position"
        )
        ids = [row[0] for row in _rows(db, members, step, GroupState.PLANNED, FORGOTTEN)]
        groups = list(_groups(db, calls, ids, corrupt))
        is_whole = groups_hash([group.group_id for group in groups]) == expected
        if not is_whole:
            log.warning("step %d is trained again without its corrupt or forgotten groups", step)
        batches.append(PlannedBatch(step, version, groups, is_whole))
    return batches


def forgotten_groups(db: Connection) -> list[str]:
    """Return the ids of forgotten groups that are still in a planned batch. These groups are not
    trained again."""
    query = "SELECT group_id FROM groups WHERE state = ? AND reason = ? ORDER BY seq"
    return [row[0] for row in _rows(db, query, GroupState.PLANNED, FORGOTTEN)]


def log_position(db: Connection) -> LogPosition:
    """Return the position at the end of the run log: the numbers of the last entry and of the last
    step, and the highest weight version. For a new run, all three are 0."""
    seq, version = db.exec_driver_sql(
        "SELECT COALESCE(MAX(seq), 0), COALESCE(MAX(version), 0) FROM entries"
    ).one()
    served = db.exec_driver_sql("SELECT COALESCE(MAX(version), 0) FROM publications").scalar()
    last = "SELECT step FROM entries WHERE kind IN ('step', 'restored') ORDER BY seq DESC LIMIT 1"
    last_step = db.exec_driver_sql(last).scalar()
    return LogPosition(seq, max(version, served or 0), last_step or 0)


def served_weights(db: Connection) -> ServedWeights | None:
    """Return the training step and the version of the weights that were served last. For a new run,
    both are 0.

    Return None if a rollback has discarded the step of these weights for good, and no other weights
    have been served after that.
    """
    newest = "SELECT version, step FROM publications ORDER BY version DESC LIMIT 1"
    served = ServedWeights(*(db.exec_driver_sql(newest).one_or_none() or ()))
    later = "SELECT entry_json FROM entries WHERE kind = 'restored' AND step < ? AND version > ?"
    restored = _rows(db, later, served.step, served.version)
    # A `restored` entry without a reason means that the steps are trained again as they were.
    is_abandoned = any(LogEntry.model_validate_json(row[0]).reason for row in restored)
    return None if is_abandoned else served


def entries(db: Connection, after: int, limit: int) -> list[LogEntry]:
    """Return up to `limit` entries of the run log whose number is above `after`."""
    query = "SELECT entry_json FROM entries WHERE seq > ? ORDER BY seq LIMIT ?"
    return [LogEntry.model_validate_json(row[0]) for row in _rows(db, query, after, limit)]


def drop_counts(db: Connection) -> dict[str, int]:
    """Return the number of groups that were ever dropped, by reason, most frequent reason first. A
    reason is shortened to the part before its first colon."""
    query = "SELECT reason, num FROM drops ORDER BY num DESC, reason"
    return {reason: num for reason, num in execute(db, query)}


def steps_since_stop(db: Connection, last: int) -> list[LogEntry]:
    """Return the entries of the run log for the steps that were trained since training last
    stopped. Steps after `last` are left out.

    The entries are ordered by step. If a step was trained more than once, only its latest entry is
    returned.
    """
    query = (
        "SELECT entry_json FROM entries WHERE seq IN "
        "(SELECT MAX(seq) FROM entries WHERE kind = 'step' AND step <= ? AND seq > "
        "(SELECT COALESCE(MAX(seq), 0) FROM entries WHERE kind = 'stopped') GROUP BY step) "
        "ORDER BY step"
    )
    return [LogEntry.model_validate_json(row[0]) for row in _rows(db, query, last)]


def step_metrics(db: Connection, last: int) -> list[dict[str, float]]:
    """Return the metrics of each training step up to `last`. If a step was trained more than once,
    only its latest metrics are returned."""
    query = (
        "SELECT entry_json FROM entries WHERE seq IN "
        "(SELECT MAX(seq) FROM entries WHERE kind = 'step' AND step <= ? GROUP BY step)"
    )
    rows = _rows(db, query, last)
    return [LogEntry.model_validate_json(row[0]).metrics for row in rows]


def step_sources(db: Connection, last: int) -> list[tuple[list[str], str]]:
    """Return, for each training step up to `last`, the digests of the reward hooks and the digest
    of the job. The list is in the order of the steps. If a step was trained more than once, its
    latest entry is used."""
    query = (
        "SELECT json_extract(entry_json, '$.hooks'), json_extract(entry_json, '$.job') "
        "FROM entries WHERE seq IN "
        "(SELECT MAX(seq) FROM entries WHERE kind = 'step' AND step <= ? GROUP BY step) "
        "ORDER BY step"
    )
    return [(json.loads(hooks or "[]"), job or "") for hooks, job in _rows(db, query, last)]


def reward_changes(db: Connection) -> list[tuple[int, str]]:
    """Return the steps at which the reward hooks or the job changed, oldest first. Rewards from
    before and after such a step cannot be compared. Each step comes with a text that says what
    changed. Steps that were rolled back are left out."""
    query = (
        "SELECT step, json_extract(entry_json, '$.changed') FROM entries WHERE seq IN "
        "(SELECT MAX(seq) FROM entries WHERE kind = 'step' AND step <= ? GROUP BY step) "
        "AND json_extract(entry_json, '$.changed') <> '' ORDER BY step"
    )
    return _rows(db, query, log_position(db).last_step)


def checkpoints(db: Connection) -> list[SavedCheckpoint]:
    """Return all checkpoints, newest first."""
    query = "SELECT step, folder, version, digest, reward_mean FROM checkpoints ORDER BY step DESC"
    return [SavedCheckpoint(*row) for row in _rows(db, query)]


def releases(db: Connection, after: int = 0) -> list[ReleaseRow]:
    """Return the history of releases, oldest first. Only decisions with a number above `after` are
    returned. Return [] if the journal is from an older server and has no such history."""
    if not _has_releases(db):
        return []
    query = (
        "SELECT number, id, decision, version, parent, at, decided_by, evidence_json, "
        "request_hash, newest, restored, is_rollback, pinned_json FROM releases "
        "WHERE number > ? ORDER BY number"
    )
    return [_release(row) for row in _rows(db, query, after)]


def _has_releases(db: Connection) -> bool:
    return bool(_rows(db, "SELECT 1 FROM sqlite_master WHERE name = 'releases'"))


def _release(row: Sequence[Any]) -> ReleaseRow:
    number, id, decision, version, parent, at, decided_by, evidence, *others = row
    request_hash, newest, restored, is_rollback, pinned = others
    record = ReleaseRecord(
        number=number,
        id=id,
        decision=decision,
        version=version,
        parent=parent,
        time_s=at,
        decided_by=decided_by,
        evidence=json.loads(evidence),
    )
    versions = json.loads(pinned)
    pins = None if versions is None else tuple(versions)
    return ReleaseRow(record, request_hash, newest, restored, bool(is_rollback), pins)


def version_changes(db: Connection, after: int) -> list[VersionChange]:
    """Return the entries of the run log that made a version of the weights, oldest first. Only
    entries with a number above `after` are returned."""
    query = (
        "SELECT seq, version, step, kind = 'step', kind = 'restored' AND "
        "COALESCE(json_extract(entry_json, '$.reason'), '') <> '', "
        "CASE kind WHEN 'restored' THEN (SELECT restored FROM releases "
        "WHERE newest + 1 = entries.version AND restored IS NOT NULL) END "
        "FROM entries WHERE seq > ? AND kind IN ('step', 'restored') ORDER BY seq"
    )
    return [
        VersionChange(seq, version, step, bool(is_step), bool(is_discarding), restored)
        for seq, version, step, is_step, is_discarding, restored in _rows(db, query, after)
    ]


def side_checkpoints(db: Connection) -> list[SavedCheckpoint]:
    """Return the side checkpoints, in the order of their versions. A side checkpoint belongs to a
    version that is no longer part of the run, because training went back to an earlier version.
    Return [] if the journal is from an older server and has no side checkpoints."""
    if not _has_releases(db):
        return []
    query = (
        "SELECT step, folder, version, digest, reward_mean FROM side_checkpoints ORDER BY version"
    )
    return [SavedCheckpoint(*row) for row in _rows(db, query)]


def checkpoint_folders(db: Connection) -> list[str]:
    """Return the folder names of all checkpoints, including side checkpoints (checkpoints of
    versions that are no longer part of the run)."""
    return [saved.folder for saved in checkpoints(db) + side_checkpoints(db)]


def submission(db: Connection, key: str) -> Submission | None:
    """Return the acknowledged request with this idempotency key, together with its reply. Return
    None if there is no such request."""
    query = 'SELECT "key", body_hash, reply_json FROM submissions WHERE "key" = ?'
    row = execute(db, query, (key,)).fetchone()
    return None if row is None else Submission(*row)


def ended_reason(db: Connection, group_id: str) -> str | None:
    """Return the reason why no new group may use this group id, or None if the id is new."""
    query = "SELECT state, reason FROM groups WHERE group_id = ?"
    row = execute(db, query, (group_id,)).fetchone()
    if row is None:
        return None
    state, reason = row
    return "already_trained" if state == GroupState.CONSUMED else reason or "already_ended"


def calls_by_sibling(db: Connection, group_id: str, num: int) -> list[list[RecordedCall]]:
    """Return the captured calls of each sibling (answer) of a group.

    `num` is the number of siblings. A sibling whose calls were deleted has an empty list. If any
    call of the group is corrupt, return [].
    """
    calls = CallReader(db)
    try:
        return [calls.of_owner(SiblingRef(group_id, index).episode_id) for index in range(num)]
    except CorruptCall:
        return []


def trained_group(db: Connection, group_id: str) -> FinishedGroup | None:
    """Return a group with its episodes and calls. Return None if its calls are damaged, or not in
    the journal any more."""
    if db.exec_driver_sql("SELECT 1 FROM groups WHERE group_id = ?", (group_id,)).first() is None:
        return None
    try:
        group = _group(db, CallReader(db), group_id)
    except CorruptCall:
        return None
    return group if any(episode.calls for episode in group.episodes) else None


def first_step_since(db: Connection, since: float) -> int | None:
    """Return the first step whose weights were served at the Unix time `since` or later. Return
    None if there is none."""
    query = "SELECT MIN(step) FROM publications WHERE at >= ?"
    return db.exec_driver_sql(query, (since,)).scalar()


def groups_trained_after(db: Connection, step: int) -> list[str]:
    """Return the ids of the groups that were trained, or are planned, in a step after `step`.

    Trained groups are read from the run log, because old rows of the table `groups` are deleted.
    """
    trained: dict[int, LogEntry] = {}
    query = (
        "SELECT entry_json FROM entries WHERE kind = 'restored' OR (kind = 'step' AND step > ?) "
        "ORDER BY seq"
    )
    for (entry_json,) in _rows(db, query, step):
        entry = LogEntry.model_validate_json(entry_json)
        if entry.kind == "restored":
            trained = {at: earlier for at, earlier in trained.items() if at <= entry.step}
        else:
            trained[entry.step] = entry
    planned = "SELECT group_id FROM groups WHERE step > ? AND state = ? ORDER BY seq"
    ids = [group.group_id for entry in trained.values() for group in entry.groups]
    return ids + [row[0] for row in _rows(db, planned, step, GroupState.PLANNED)]


def num_bytes(db: Connection) -> int:
    """Return the size of the journal's content, without free pages of the file."""
    query = (
        "SELECT (page_count - freelist_count) * page_size "
        "FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
    )
    return db.exec_driver_sql(query).scalar_one()


def last_pruned(db: Connection) -> int:
    """Return the number of the last step whose captured calls were deleted, or 0 if no calls were
    deleted."""
    return int(meta(db, PRUNED) or 0)


def answering_versions(db: Connection) -> list[int]:
    """Return the versions that answer apps as policies (versions that the engine holds beside the
    served weights). The version that was pinned last comes last."""
    return json.loads(meta(db, ANSWERING) or "[]")


def training_limit(db: Connection) -> int | None:
    """Return the newest version that training may make, or None if there is no limit."""
    value = meta(db, TRAINING_LIMIT)
    return None if value is None else int(value)


def meta(db: Connection, key: str) -> str | None:
    """Return the value of a key in the table `meta`, which has facts about the run. Return None if
    the table does not have the key."""
    return db.exec_driver_sql('SELECT value FROM meta WHERE "key" = ?', (key,)).scalar()


def _read_open_groups(db: Connection, calls: CallReader, pending: PendingWork) -> None:
    query = (
        f"SELECT c.group_id, c.owner, {CALL_COLUMNS} FROM calls c "
        "LEFT JOIN groups g ON g.group_id = c.group_id "
        "WHERE c.group_id IS NOT NULL AND g.group_id IS NULL ORDER BY c.id"
    )
    for group_id, owner, *row in _rows(db, query):
        try:
            call = calls.parse(row)
        except CorruptCall:
            pending.corrupt.append(group_id)
            continue
        index = parse_sibling(owner).index
        pending.open_groups.setdefault(group_id, {}).setdefault(index, []).append(call)
    for group_id in pending.corrupt:
        pending.open_groups.pop(group_id, None)


def _groups(
    db: Connection, calls: CallReader, ids: Sequence[str], corrupt: list[str]
) -> Iterator[FinishedGroup]:
    for group_id in ids:
        try:
            yield _group(db, calls, group_id)
        except CorruptCall:
            corrupt.append(group_id)


def _group(db: Connection, calls: CallReader, group_id: str) -> FinishedGroup:
    """Return a group with its episodes and calls. Raises CorruptCall if a call does not match its
    stored digest."""
    members = (
        'SELECT owner, "index", reward, task_id FROM samples WHERE group_id = ? ORDER BY "index"'
    )
    samples = [ScoredSample(*row) for row in _rows(db, members, group_id)]
    episodes = [
        ScoredEpisode(
            sample.index, sample.reward, tuple(calls.of_owner(sample.owner)), sample.owner
        )
        for sample in samples
    ]
    query = "SELECT advantage, hook_hash, demonstrates FROM groups WHERE group_id = ?"
    advantage, hook_hash, demonstrates = db.exec_driver_sql(query, (group_id,)).one()
    return FinishedGroup(
        group_id, episodes, advantage=advantage, hook_hash=hook_hash, demonstrates=demonstrates
    )


def _rows(db: Connection, query: str, *values: Any) -> list[Any]:
    return [tuple(row) for row in db.exec_driver_sql(query, values)]
