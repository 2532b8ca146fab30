"""What is read from the journal: all a next life begins with, and single facts by their key."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from fakevllm_adapters.protocol.swarm import LogEntry, SiblingRef, parse_sibling
from fakevllm_server.episodes.registry import Episode, Idempotency
from fakevllm_server.journal.rows import (
    CALL_COLUMNS,
    PRUNED,
    CorruptCall,
    SavedCheckpoint,
    ScoredSample,
    Submission,
    call_of,
    groups_hash,
)
from fakevllm_server.journal.tables import BatchState, EpisodeState, GroupState
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode

log = logging.getLogger("fakevllm.server")

CORRUPT = "corrupt"
"""Why a group is dropped of which a call is not what was written."""


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """What a step trains: its groups in order, and the version of the weights before it."""

    step: int
    version: int
    groups: Sequence[FinishedGroup]
    is_whole: bool = True
    """Whether those are all that were planned."""


@dataclass(slots=True)
class PendingWork:
    """Acknowledged or captured, and not trained yet."""

    claimed: list[Episode] = field(default_factory=list[Episode])
    open_episodes: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Ids and last epochs of episodes that nobody has claimed."""
    open_groups: dict[str, dict[int, list[RecordedCall]]] = field(
        default_factory=dict[str, dict[int, list[RecordedCall]]]
    )
    samples: list[tuple[ScoredSample, list[RecordedCall]]] = field(
        default_factory=list[tuple[ScoredSample, list[RecordedCall]]]
    )
    """Of active clients, whose tasks are not complete."""
    groups: list[FinishedGroup] = field(default_factory=list[FinishedGroup])
    """Pooled, in the order they came."""
    corrupt: list[str] = field(default_factory=list[str])
    """Groups of which something is not what was written."""
    corrupt_claims: list[Episode] = field(default_factory=list[Episode])
    corrupt_samples: list[ScoredSample] = field(default_factory=list[ScoredSample])


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Where the run's log ends."""

    last_seq: int
    version: int
    """Highest ever published or promised."""
    last_step: int


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """Weights that apps are answered with."""

    version: int = 0
    step: int = 0
    """At whose end they came about."""


def waiting(db: Connection, now: float) -> PendingWork:
    """Clients of earlier lives are given their whole time again, from `now` on."""
    found = PendingWork()
    claimed = (
        'SELECT episode_id, epoch, "key", client_uuid, kind, idle_limit_s, owner, '
        "idempotency_key, body_hash FROM episodes WHERE state = ?"
    )
    for *row, owner, key, body_hash in _rows(db, claimed, EpisodeState.CLAIMED):
        again = Idempotency(key, body_hash) if key else None
        episode = Episode(*row, last_activity=now, owner=owner, idempotency=again)
        try:
            episode.calls.extend(_calls(db, episode.uuid))
        except CorruptCall:
            found.corrupt_claims.append(episode)
        else:
            found.claimed.append(episode)
    opened = "SELECT episode_id, epoch FROM episodes WHERE state = ? ORDER BY rowid"
    found.open_episodes = [(row[0], row[1]) for row in _rows(db, opened, EpisodeState.OPEN)]
    _read_open_groups(db, found)
    for row in _rows(
        db,
        'SELECT owner, "index", reward, task_id FROM samples WHERE group_id IS NULL ORDER BY rowid',
    ):
        sample = ScoredSample(*row)
        try:
            found.samples.append((sample, _calls(db, sample.owner)))
        except CorruptCall:
            found.corrupt_samples.append(sample)
    pooled = "SELECT group_id FROM groups WHERE state = ? ORDER BY seq"
    ids = [row[0] for row in _rows(db, pooled, GroupState.POOLED)]
    found.groups = list(_groups(db, ids, found.corrupt))
    return found


def planned(db: Connection, corrupt: list[str]) -> list[PlannedBatch]:
    """Batches that were planned and are not trained, oldest first. Groups of which something is not
    what was written are left out, and added to `corrupt`."""
    found: list[PlannedBatch] = []
    batches = "SELECT step, version, groups_hash FROM batches WHERE state = ? ORDER BY step"
    for step, version, expected in _rows(db, batches, BatchState.PLANNED):
        members = "SELECT group_id FROM groups WHERE step = ? AND state = ? ORDER BY position"
        ids = [row[0] for row in _rows(db, members, step, GroupState.PLANNED)]
        groups = list(_groups(db, ids, corrupt))
        is_whole = groups_hash([group.group_id for group in groups]) == expected
        if not is_whole:
            log.error("step %d is trained again without some of its groups", step)
        found.append(PlannedBatch(step, version, groups, is_whole))
    return found


def standing(db: Connection) -> LogPosition:
    seq, version = db.exec_driver_sql(
        "SELECT COALESCE(MAX(seq), 0), COALESCE(MAX(version), 0) FROM entries"
    ).one()
    served = db.exec_driver_sql("SELECT COALESCE(MAX(version), 0) FROM publications").scalar()
    last = "SELECT step FROM entries WHERE kind IN ('step', 'restored') ORDER BY seq DESC LIMIT 1"
    last_step = db.exec_driver_sql(last).scalar()
    return LogPosition(seq, max(version, served or 0), last_step or 0)


def served(db: Connection) -> ServedWeights | None:
    """None where they were given up, and no others have been served since."""
    newest = "SELECT version, step FROM publications ORDER BY version DESC LIMIT 1"
    found = ServedWeights(*(db.exec_driver_sql(newest).one_or_none() or ()))
    later = "SELECT entry_json FROM entries WHERE kind = 'restored' AND step < ? AND version > ?"
    restored = _rows(db, later, found.step, found.version)
    # Without a reason it is trained again, as it was.
    is_given_up = any(LogEntry.model_validate_json(row[0]).reason for row in restored)
    return None if is_given_up else found


def entries(db: Connection, after: int, limit: int) -> list[LogEntry]:
    query = "SELECT entry_json FROM entries WHERE seq > ? ORDER BY seq LIMIT ?"
    return [LogEntry.model_validate_json(row[0]) for row in _rows(db, query, after, limit)]


def drops(db: Connection) -> dict[str, int]:
    """Groups that were ever dropped, by the first word of the reason; the most frequent first."""
    query = "SELECT reason, num FROM drops ORDER BY num DESC, reason"
    return {reason: num for reason, num in _rows(db, query)}


def steps_since_stop(db: Connection, last: int) -> list[LogEntry]:
    """The steps up to `last` that were made since training last stopped for good, each as it was
    trained last, oldest first."""
    query = (
        "SELECT entry_json FROM entries WHERE seq IN "
        "(SELECT MAX(seq) FROM entries WHERE kind = 'step' AND step <= ? AND seq > "
        "(SELECT COALESCE(MAX(seq), 0) FROM entries WHERE kind = 'stopped') GROUP BY step) "
        "ORDER BY step"
    )
    return [LogEntry.model_validate_json(row[0]) for row in _rows(db, query, last)]


def step_metrics(db: Connection, last: int) -> list[dict[str, float]]:
    """Of the steps up to `last`, each as it was trained last."""
    query = (
        "SELECT entry_json FROM entries WHERE seq IN "
        "(SELECT MAX(seq) FROM entries WHERE kind = 'step' AND step <= ? GROUP BY step)"
    )
    rows = _rows(db, query, last)
    return [LogEntry.model_validate_json(row[0]).metrics for row in rows]


def checkpoints(db: Connection) -> list[SavedCheckpoint]:
    """Newest first."""
    query = "SELECT step, folder, version, digest, reward_mean FROM checkpoints ORDER BY step DESC"
    return [SavedCheckpoint(*row) for row in _rows(db, query)]


def submission(db: Connection, key: str) -> Submission | None:
    query = 'SELECT "key", body_hash, reply_json FROM submissions WHERE "key" = ?'
    row = db.exec_driver_sql(query, (key,)).one_or_none()
    return None if row is None else Submission(*row)


def why_ended(db: Connection, group_id: str) -> str | None:
    """Why a group of this id may not come again; None where there has been none."""
    query = "SELECT state, reason FROM groups WHERE group_id = ?"
    row = db.exec_driver_sql(query, (group_id,)).one_or_none()
    if row is None:
        return None
    state, reason = row
    return "already_trained" if state == GroupState.CONSUMED else reason or "already_ended"


def calls_by_sibling(db: Connection, group_id: str, num: int) -> list[list[RecordedCall]]:
    """As far as they are kept."""
    try:
        return [_calls(db, SiblingRef(group_id, index).episode_id) for index in range(num)]
    except CorruptCall:
        return []


def trained_after(db: Connection, step: int) -> list[str]:
    """Of the trained ones as the log tells it: the rows of groups are not kept for ever."""
    trained: dict[int, LogEntry] = {}
    query = (
        "SELECT entry_json FROM entries WHERE kind = 'restored' OR (kind = 'step' AND step > ?) "
        "ORDER BY seq"
    )
    for (entry_json,) in _rows(db, query, step):
        entry = LogEntry.model_validate_json(entry_json)
        if entry.kind == "restored":
            trained = {at: made for at, made in trained.items() if at <= entry.step}
        else:
            trained[entry.step] = entry
    planned = "SELECT group_id FROM groups WHERE step > ? AND state = ? ORDER BY seq"
    ids = [one.group_id for made in trained.values() for one in made.groups]
    return ids + [row[0] for row in _rows(db, planned, step, GroupState.PLANNED)]


def last_pruned(db: Connection) -> int:
    """The last step whose calls are not kept any more."""
    return int(meta(db, PRUNED) or 0)


def meta(db: Connection, key: str) -> str | None:
    return db.exec_driver_sql('SELECT value FROM meta WHERE "key" = ?', (key,)).scalar()


def _read_open_groups(db: Connection, found: PendingWork) -> None:
    query = (
        f"SELECT c.group_id, c.owner, {CALL_COLUMNS} FROM calls c "
        "LEFT JOIN groups g ON g.group_id = c.group_id "
        "WHERE c.group_id IS NOT NULL AND g.group_id IS NULL ORDER BY c.id"
    )
    for group_id, owner, *row in _rows(db, query):
        try:
            call = call_of(tuple(row))
        except CorruptCall:
            found.corrupt.append(group_id)
            continue
        index = parse_sibling(owner).index
        found.open_groups.setdefault(group_id, {}).setdefault(index, []).append(call)
    for group_id in found.corrupt:
        found.open_groups.pop(group_id, None)


def _groups(db: Connection, ids: Sequence[str], corrupt: list[str]) -> Iterator[FinishedGroup]:
    for group_id in ids:
        try:
            yield _group(db, group_id)
        except CorruptCall:
            corrupt.append(group_id)


def _group(db: Connection, group_id: str) -> FinishedGroup:
    """Raises CorruptCall."""
    members = (
        'SELECT owner, "index", reward, task_id FROM samples WHERE group_id = ? ORDER BY "index"'
    )
    samples = [ScoredSample(*row) for row in _rows(db, members, group_id)]
    episodes = [
        ScoredEpisode(one.index, one.reward, tuple(_calls(db, one.owner)), one.owner)
        for one in samples
    ]
    query = "SELECT advantage FROM groups WHERE group_id = ?"
    return FinishedGroup(
        group_id, episodes, advantage=db.exec_driver_sql(query, (group_id,)).scalar()
    )


def _calls(db: Connection, owner: str) -> list[RecordedCall]:
    """Raises CorruptCall."""
    query = f"SELECT {CALL_COLUMNS} FROM calls WHERE owner = ? ORDER BY seq"
    return [call_of(row) for row in _rows(db, query, owner)]


def _rows(db: Connection, query: str, *values: Any) -> list[Any]:
    return [tuple(row) for row in db.exec_driver_sql(query, values)]
