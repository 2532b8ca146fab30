"""The functions that change rows of the ledger (the proxy's SQLite file). Each function runs in a
transaction that the caller has begun, and in a block of `counters.counted`."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from base64 import b64decode
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import orjson
from sqlalchemy import Connection, Table
from sqlalchemy.dialects import sqlite

from fakevllm.ledger import counters, edit_rows, feedback_rows
from fakevllm.ledger.forgotten_groups import is_forgotten
from fakevllm.ledger.reasons import EndReason
from fakevllm.ledger.records import (
    GroupRecord,
    KeptAnswer,
    SiblingRecord,
    State,
    StoredResponse,
)
from fakevllm.ledger.stored_contents import CallContents, put_request
from fakevllm.ledger.stored_messages import stored_message
from fakevllm.ledger.tables import (
    CALL_ROWS,
    GROUP_ROWS,
    GROUPS,
    KEPT_ANSWERS,
    META,
    RESPONSES,
    SIBLING_ROWS,
    SIBLINGS,
    TASKS,
    TRAINED_VERSIONS,
)
from fakevllm_adapters.protocol.swarm import CapturedCall, LogEntry, Task, TrainedGroup
from fakevllm_runtime.contents import dbapi_connection


def _replace(table: Table) -> str:
    return str(table.insert().prefix_with("OR REPLACE").compile(dialect=sqlite.dialect()))


# Compiled once, and run with tuples: every request of the app writes a record.
_PUT_GROUP = _replace(GROUP_ROWS)
_PUT_SIBLING = _replace(SIBLING_ROWS)
_PUT_CALL = _replace(CALL_ROWS)
_PUT_TASK = _replace(TASKS)
_PUT_META = _replace(META)
_PUT_KEPT = _replace(KEPT_ANSWERS)
_PUT_RESPONSE = _replace(RESPONSES)
_PUT_VERSION = _replace(TRAINED_VERSIONS)
_GROUP_ROW = attrgetter(*GROUPS.columns.keys())
_REQUEST_JSON = GROUPS.columns.keys().index("request_json")
_MESSAGE_JSON = SIBLINGS.columns.keys().index("message_json")
_SIBLING_ROW = attrgetter(*SIBLINGS.columns.keys()[1:])

_TASK_SECRET = "task_secret"
_ARM_SALT = "arm_salt"
_ID_SECRET = "id_secret"

_SETTLE = """
    UPDATE group_rows SET step = ?1, run_id = COALESCE(?5, run_id),
    job_hash = COALESCE(?6, job_hash),
    state = CASE WHEN state IN ('trained', 'dropped', 'lost') THEN state ELSE ?2 END,
    reason = CASE WHEN state IN ('trained', 'dropped', 'lost') THEN reason ELSE ?3 END
    WHERE group_id = ?4
"""
_MARK_RESENT = """
    UPDATE group_rows SET num_resent = num_resent + 1,
    status = CASE WHEN status = 499 THEN 200 ELSE status END WHERE group_id = ?
"""
_MARK_TRAINED = """
    UPDATE group_rows SET state = 'trained', reason = NULL, trained_step = ?, trained_version = ?,
    run_id = COALESCE(run_id, ?) WHERE group_id = ?
"""
_TRAINED_SINCE = "SELECT group_id FROM group_rows WHERE run_id = ? AND trained_step > ?"
_UNMARK_SIBLINGS_SINCE = f"""
    UPDATE sibling_rows SET trained = 0, advantage = NULL WHERE group_id IN ({_TRAINED_SINCE})
"""
_UNTRAIN_GROUPS_SINCE = """
    UPDATE group_rows SET state = 'pooled', trained_step = NULL, trained_version = NULL
    WHERE run_id = ? AND trained_step > ?
"""
_MARK_SIBLING = (
    'UPDATE sibling_rows SET trained = 1, advantage = ? WHERE group_id = ? AND "index" = ?'
)
_END_UNTRAINED = """
    UPDATE group_rows SET state = ?, reason = ?, trained_step = NULL, trained_version = NULL
    WHERE group_id = ?
"""


def put_groups(db: Connection, records: Iterable[GroupRecord]) -> None:
    """Write groups (requests) and their siblings (sampled answers). If a group is already stored,
    the new record replaces the old one, and the group's recorded model calls are deleted."""
    latest = list({record.group_id: record for record in records}.values())
    counters.watch(db, [record.group_id for record in latest])
    _many(db, _PUT_GROUP, [_group_row(db, record) for record in latest])
    siblings = [
        _sibling_row(record.group_id, sibling) for record in latest for sibling in record.siblings
    ]
    _many(db, _PUT_SIBLING, siblings)
    for record in latest:
        if record.kept_answer is not None:
            keep_answer(db, record.kept_answer)


def _group_row(db: Connection, record: GroupRecord) -> tuple[Any, ...]:
    slices_json, digest = put_request(
        db,
        record.group_id,
        record.parent_id,
        record.app_key,
        record.route,
        record.request_json,
    )
    row = [*_GROUP_ROW(record), slices_json, digest]
    if slices_json is not None:
        row[_REQUEST_JSON] = ""
    return tuple(row)


def _sibling_row(group_id: str, sibling: SiblingRecord) -> tuple[Any, ...]:
    message_json, *places = stored_message(
        sibling.message_json, sibling.text, sibling.tool_calls_json
    )
    row = [group_id, *_SIBLING_ROW(sibling), *places]
    row[_MESSAGE_JSON] = message_json
    return tuple(row)


def keep_answer(db: Connection, answer: KeptAnswer) -> None:
    """Store an answer for a retry of its request, and delete expired answers.

    The ledger may not have the row of the answer's group (request) yet, because a streamed answer
    can end before the group ends. The answer of a forgotten group is not stored.
    """
    if is_forgotten(db, answer.group_id):
        return
    headers = orjson.dumps(answer.headers).decode()
    row = (answer.group_id, answer.key, answer.until, answer.status, headers, answer.body)
    db.exec_driver_sql("DELETE FROM kept_answers WHERE until < ?", (time.time(),))
    db.exec_driver_sql(_PUT_KEPT, row)


def store_response(db: Connection, response: StoredResponse) -> None:
    """Store a response of the Responses API. An earlier response with the same id and the same API
    key is replaced. The response of a forgotten group is not stored."""
    if is_forgotten(db, response.group_id):
        return
    owner = response.app_key or ""
    row = (response.response_id, owner, response.group_id, response.created_at, response.body, None)
    db.exec_driver_sql(_PUT_RESPONSE, row)


def delete_response(db: Connection, response: StoredResponse, at: float) -> None:
    """Mark a response of the Responses API as deleted, and delete its body. Also delete the answer
    if it was kept for a retry of the request."""
    owner = response.app_key or ""
    row = (response.response_id, owner, response.group_id, response.created_at, None, at)
    db.exec_driver_sql(_PUT_RESPONSE, row)
    db.exec_driver_sql("DELETE FROM kept_answers WHERE group_id = ?", (response.group_id,))


def mark_resent(db: Connection, group_id: str) -> None:
    """Record that a retry of the request `group_id` got the answer. Delete the copy of the answer
    that was kept for the retry."""
    db.exec_driver_sql(_MARK_RESENT, (group_id,))
    db.exec_driver_sql("DELETE FROM kept_answers WHERE group_id = ?", (group_id,))


def settle(
    db: Connection,
    group_id: str,
    state: str,
    reason: str | None,
    step: int | None,
    calls: Sequence[Sequence[CapturedCall]],
    run_id: str | None = None,
    job_hash: str | None = None,
    prompts: Sequence[bytes] = (),
) -> None:
    """Store the server's reply to the rewards of a group (a request with its sampled answers). If
    the ledger does not have the group, do nothing.

    If the group is already in the state `trained`, `dropped` or `lost`, its state stays unchanged.
    The model calls of a forgotten group are not stored.
    `calls[i]` has the model calls of sibling i (the i-th sampled answer). `prompts` are the prompts
    to which calls refer by index.
    """
    counters.watch(db, [group_id])
    # Bypasses SQLAlchemy, as `_many` does: every group with siblings is settled.
    update = dbapi_connection(db).execute(
        _SETTLE, (step, state, reason, group_id, run_id or None, job_hash or None)
    )
    if update.rowcount == 0 or is_forgotten(db, group_id):
        return
    contents = CallContents(db, group_id)
    rows = [
        _call_row(contents, (group_id, sibling, seq), call, _prompt_ids(call, prompts))
        for sibling, sibling_calls in enumerate(calls)
        for seq, call in enumerate(sibling_calls)
    ]
    _many(db, _PUT_CALL, rows)


def apply_log(db: Connection, run_id: str, entries: Sequence[LogEntry]) -> None:
    """Apply entries of the server's run log to the ledger. The run log reports which groups were
    trained, dropped or lost. For each training run, the ledger stores the number of the last
    applied entry. Entries up to this number are skipped."""
    cursor = read_cursor(db, run_id)
    new = [entry for entry in sorted(entries, key=attrgetter("seq")) if entry.seq > cursor]
    for entry in new:
        _apply(db, run_id, entry)
    if new:
        db.exec_driver_sql(_PUT_META, (_cursor_key(run_id), str(new[-1].seq)))


def read_cursor(db: Connection, run_id: str) -> int:
    """Return the number of the last run log entry that was applied to the ledger for this training
    run. Return 0 if no entry was applied."""
    row = db.exec_driver_sql("SELECT value FROM meta WHERE key = ?", (_cursor_key(run_id),))
    return int(row.scalar() or 0)


def task_secret(db: Connection) -> bytes:
    """Return the secret with which the proxy signs task keys (API keys that each name one task). If
    the ledger has no secret yet, create one."""
    return _random_bytes(db, _TASK_SECRET)


def id_secret(db: Connection) -> bytes:
    """Return the secret with which ids that contain redacted text are hashed. If the ledger has no
    secret yet, create one."""
    return _random_bytes(db, _ID_SECRET)


def arm_salt(db: Connection) -> bytes:
    """Return the salt with which sessions are assigned to arms. The arm of a session decides which
    weights answer the session. If the ledger has no salt yet, create one."""
    return _random_bytes(db, _ARM_SALT)


def _random_bytes(db: Connection, key: str) -> bytes:
    stored = db.exec_driver_sql("SELECT value FROM meta WHERE key = ?", (key,)).scalar()
    if stored is None:
        stored = secrets.token_hex(32)
        db.exec_driver_sql(_PUT_META, (key, stored))
    return bytes.fromhex(stored)


def put_tasks(db: Connection, tasks: Sequence[Task], owner: str | None) -> None:
    """Write tasks and their owner. If a task with the same id is already stored, the task and its
    owner are replaced."""
    now = time.time()
    rows = [
        (task.task_id, task.main_query, orjson.dumps(task.metadata).decode(), now, owner)
        for task in tasks
    ]
    _many(db, _PUT_TASK, rows)


def _apply(db: Connection, run_id: str, entry: LogEntry) -> None:
    feedback_rows.apply_log_entry(db, entry)
    edit_rows.apply_log_entry(db, entry)
    match entry.kind:
        case "step":
            ids = [group.group_id for group in entry.groups]
            counters.watch(db, ids)
            rows = [(entry.step, entry.version, run_id, group_id) for group_id in ids]
            _many(db, _MARK_TRAINED, rows)
            _unmark(db, ids)
            _many(db, _MARK_SIBLING, [mark for group in entry.groups for mark in _marks(group)])
            seconds = [_seconds(entry, name) for name in ("step_seconds", "seconds")]
            _many(db, _PUT_VERSION, [(run_id, entry.version, entry.step, *seconds)])
        case "dropped":
            counters.watch(db, entry.reasons)
            rows = [(State.DROPPED, reason, group_id) for group_id, reason in entry.reasons.items()]
            _many(db, _END_UNTRAINED, rows)
            _unmark(db, list(entry.reasons))
        case "restored":
            # The server will train the groups of the steps after this one a second time.
            undone = db.exec_driver_sql(_TRAINED_SINCE, (run_id, entry.step)).scalars()
            counters.watch(db, [*undone, *entry.lost])
            for undo in (_UNMARK_SIBLINGS_SINCE, _UNTRAIN_GROUPS_SINCE):
                db.exec_driver_sql(undo, (run_id, entry.step))
            reason = entry.reason or EndReason.SERVER_CRASHED.value
            rows = [(State.LOST, reason, group_id) for group_id in entry.lost]
            _many(db, _END_UNTRAINED, rows)
            _unmark(db, entry.lost)
        case _:  # an entry that concerns no group, or that only a newer server writes
            pass


def _seconds(entry: LogEntry, name: str) -> float | None:
    """Return a step's metric in seconds, or None if the server has not measured it."""
    value = entry.metrics.get(name)
    return value if value is not None and math.isfinite(value) else None


def _unmark(db: Connection, group_ids: Sequence[str]) -> None:
    rows = [(group_id,) for group_id in group_ids]
    _many(db, "UPDATE sibling_rows SET trained = 0, advantage = NULL WHERE group_id = ?", rows)


def _marks(group: TrainedGroup) -> list[tuple[float | None, str, int]]:
    """Return a triple (advantage, group id, sibling index) for each trained sibling (sampled
    answer) of a group.

    The advantage is None if the server is too old to report advantages.
    """
    pairs = itertools.zip_longest(group.siblings, group.advantages[: len(group.siblings)])
    return [(advantage, group.group_id, index) for index, advantage in pairs]


def _prompt_ids(call: CapturedCall, prompts: Sequence[bytes]) -> bytes:
    return b64decode(call.prompt_ids) if call.prompt is None else prompts[call.prompt]


def _call_row(
    contents: CallContents, key: tuple[str, int, int], call: CapturedCall, prompt_ids: bytes
) -> tuple[Any, ...]:
    response_ids = b64decode(call.response_ids)
    prompt_id, response_piece = contents.put(key[1], prompt_ids, response_ids)
    return (
        *key,
        prompt_ids if prompt_id is None else b"",
        response_ids if response_piece is None else b"",
        None if call.logprobs is None else b64decode(call.logprobs),
        orjson.dumps(call.weight_versions).decode(),
        min((span[0] for span in call.weight_versions), default=None),
        call.temperature,
        call.finish_reason,
        call.untrainable,
        call.shaped,
        call.replica,
        prompt_id,
        response_piece,
    )


def _cursor_key(run_id: str) -> str:
    return f"log_cursor:{run_id}"


def _many(db: Connection, statement: str, rows: list[tuple[Any, ...]]) -> None:
    if rows:
        # Bypasses SQLAlchemy, which would double the cost.
        dbapi_connection(db).executemany(statement, rows)
