"""Delete the contents of groups (requests with their sampled answers) from the ledger. The rows of
the groups stay, and keep their numbers, such as rewards.

Long contents, such as requests and prompts, are stored as slices of pieces. A piece is a row of
bytes that several contents may share. To never hold the ledger's writer for long, contents are
deleted in two stages:

1. `forget` clears the columns with texts, deletes the model calls, and notes the pieces that the
   groups used. Each call of `forget` is for a few groups.
2. `used_ranges` finds the parts of these pieces that other contents use. It does not need the
   writer. `erase` then deletes the pieces that no content uses. In all other pieces, `erase`
   overwrites the bytes that no content uses.

After `used_ranges` has begun, new contents may begin to use the pieces. `erase` therefore also
reads the rows that were added since then, and recognizes these rows by their row numbers. For this
reason, only one task of one process may forget groups at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import orjson
from sqlalchemy import Connection, Engine

from fakevllm.ledger import counters
from fakevllm.ledger.records import State
from fakevllm.ledger.stored_groups import OPEN_FEEDBACK
from fakevllm.ledger.writer import WriteReceipt
from fakevllm_adapters.protocol.forgetting import FORGOTTEN
from fakevllm_runtime.contents import Slice, content_store, dbapi_connection
from fakevllm_runtime.piece_ranges import PieceRanges

ROWS_PER_READ = 5_000
"""Number of rows that one read examines for uses of pieces. A read that takes long would keep the
write-ahead log from being truncated."""

_IDS = "(SELECT value FROM json_each(?))"
_SLUG = "substr(reason, 1, instr(reason || ':', ':') - 1)"
"""SQL for a reason without its details, which may quote an error message."""
_EDIT_SLUG = _SLUG.replace("reason", "edit_reason")
_VALID = "CASE WHEN json_valid({0}) THEN {0} ELSE '[]' END"
"""SQL for the slices of a content. A damaged list counts as empty, because nothing can be read with
it."""

_NOTE = f"""
    INSERT INTO forgotten_groups SELECT group_id, ?, ?, 0 FROM group_rows WHERE group_id IN {_IDS}
    ON CONFLICT (group_id) DO NOTHING
"""
_STILL_UNUSED = f"""
    SELECT group_id FROM group_rows AS g WHERE group_id IN {_IDS}
    AND state NOT IN ('{State.SCORED}', '{State.POOLED}') AND NOT {OPEN_FEEDBACK}
    AND NOT EXISTS (SELECT 1 FROM kept_answers AS k WHERE k.group_id = g.group_id AND until > ?)
"""
_LOOSEN_REQUESTS = f"""
    INSERT OR IGNORE INTO loose_pieces SELECT json_extract(s.value, '$[0]')
    FROM group_rows AS g, json_each({_VALID.format("g.request_slices")}) AS s
    WHERE g.group_id IN {_IDS} AND json_extract(s.value, '$[0]') IS NOT NULL
"""
_LOOSEN_PROMPTS = f"""
    INSERT OR IGNORE INTO loose_pieces SELECT json_extract(s.value, '$[0]')
    FROM prompts AS q, json_each({_VALID.format("q.slices")}) AS s
    WHERE q.prompt_id IN (SELECT prompt FROM call_rows WHERE group_id IN {_IDS})
    AND json_extract(s.value, '$[0]') IS NOT NULL
"""
_LOOSEN_RESPONSES = f"""
    INSERT OR IGNORE INTO loose_pieces SELECT response_piece FROM call_rows
    WHERE response_piece IS NOT NULL AND group_id IN {_IDS}
"""
_CLEAR = (
    f"""
    DELETE FROM prompts WHERE prompt_id IN
    (SELECT prompt FROM call_rows WHERE group_id IN {_IDS})
    """,
    f"DELETE FROM call_rows WHERE group_id IN {_IDS}",
    f"""
    UPDATE group_rows SET request_json = '{{}}', request_slices = NULL, request_digest = NULL,
    question = '', asked_key = NULL, response_id = NULL, answer_id = NULL, reason = {_SLUG}
    WHERE group_id IN {_IDS}
    """,
    f"""
    UPDATE sibling_rows SET message_json = NULL, text = NULL, tool_calls_json = NULL,
    annotations_json = NULL, error = NULL, text_at = NULL, tool_calls_at = NULL
    WHERE group_id IN {_IDS}
    """,
    f"""
    UPDATE rescored SET annotations_json = NULL, reason = {_SLUG} WHERE group_id IN {_IDS}
    """,
    f"""
    UPDATE feedback SET edited = NULL, comment = NULL,
    reason = CASE WHEN state = 'waiting' THEN '{FORGOTTEN}' ELSE {_SLUG} END,
    state = CASE WHEN state = 'waiting' THEN 'dropped' ELSE state END,
    edit_reason = CASE WHEN edit_state = 'waiting' THEN '{FORGOTTEN}' ELSE {_EDIT_SLUG} END,
    edit_state = CASE WHEN edit_state = 'waiting' THEN 'dropped' ELSE edit_state END
    WHERE group_id IN {_IDS}
    """,
    f"DELETE FROM kept_answers WHERE group_id IN {_IDS}",
)
_CLEAR_RESPONSES = f"""
    UPDATE responses SET body = NULL, deleted_at = COALESCE(deleted_at, ?)
    WHERE group_id IN {_IDS}
"""
_IS_FORGOTTEN = "SELECT 1 FROM forgotten_groups WHERE group_id = ?"
_LOOSE = "SELECT piece_id FROM loose_pieces ORDER BY piece_id"
_FENCE = """
    SELECT (SELECT COALESCE(MAX(rowid), 0) FROM group_rows),
           (SELECT COALESCE(MAX(prompt_id), 0) FROM prompts)
"""
_USES = (
    """
    SELECT rowid, request_slices FROM group_rows WHERE rowid > ? AND rowid <= ?
    ORDER BY rowid LIMIT ?
    """,
    """
    SELECT prompt_id, slices FROM prompts WHERE prompt_id > ? AND prompt_id <= ?
    ORDER BY prompt_id LIMIT ?
    """,
)
_RESPONSE_USES = f"SELECT response_piece FROM call_rows WHERE response_piece IN {_IDS}"
_NEW_USES = (
    "SELECT request_slices FROM group_rows WHERE request_slices IS NOT NULL AND rowid > ?",
    "SELECT slices FROM prompts WHERE prompt_id > ?",
)
_PIECE = "SELECT data FROM pieces WHERE piece_id = ?"
_DELETE_PIECE = "DELETE FROM pieces WHERE piece_id = ?"
_OVERWRITE_PIECE = "UPDATE pieces SET data = ? WHERE piece_id = ?"
_TIGHTEN = "DELETE FROM loose_pieces WHERE piece_id = ?"

_OF_SESSION = """
    WITH RECURSIVE wanted (session_id) AS (
        VALUES (?1) UNION
        SELECT c.session_id FROM session_counters AS c JOIN wanted AS w
        ON c.parent_session_id = w.session_id
    )
    SELECT {} FROM group_rows AS g WHERE session_id IN (SELECT session_id FROM wanted)
"""
_OF_KEY = "SELECT {} FROM group_rows AS g WHERE app_key = ?1"
_OF_ID = """
    SELECT {} FROM group_rows AS g WHERE group_id = ?1 OR response_id = ?1 OR answer_id = ?1
"""
_STATE = """
    group_id, state,
    EXISTS (SELECT 1 FROM forgotten_groups AS f WHERE f.group_id = g.group_id)
"""
_VERSIONS = f"""
    SELECT run_id, trained_version FROM group_rows
    WHERE trained_version IS NOT NULL AND group_id IN {_IDS}
    UNION
    SELECT g.run_id, f.trained_version FROM feedback AS f JOIN group_rows AS g USING (group_id)
    WHERE f.trained_version IS NOT NULL AND f.group_id IN {_IDS}
    UNION
    SELECT g.run_id, f.edit_version FROM feedback AS f JOIN group_rows AS g USING (group_id)
    WHERE f.edit_version IS NOT NULL AND f.group_id IN {_IDS}
    ORDER BY 1, 2
"""
_UNSENT = """
    SELECT g.group_id FROM forgotten_groups AS f JOIN group_rows AS g USING (group_id)
    WHERE NOT f.is_sent AND (g.run_id IS NULL OR g.run_id = ?1)
    AND (?2 IS NULL OR f.group_id IN (SELECT value FROM json_each(?2))) LIMIT ?3
"""
_NUM_UNSENT = """
    SELECT COUNT(*) FROM forgotten_groups WHERE NOT is_sent
    AND (?1 IS NULL OR group_id IN (SELECT value FROM json_each(?1)))
"""
_SAMPLES = f"SELECT group_id, feedback_id FROM feedback WHERE group_id IN {_IDS}"
_MARK_SENT = f"UPDATE forgotten_groups SET is_sent = 1 WHERE group_id IN {_IDS}"
_COUNTS = "SELECT name, num FROM counters WHERE subject = 'forgotten'"


class Cause(StrEnum):
    """The reason why the contents of a group were deleted."""

    FORGOTTEN = "forgotten"
    """A user asked for it with `fakevllm forget`."""
    PRUNED = "pruned"
    """The retention settings asked for it."""


class TargetKind(StrEnum):
    """The ways to choose the groups to forget: by a session, by an API key, or by an id."""

    SESSION = "session"
    KEY = "key"
    ID = "id"


@dataclass(frozen=True, slots=True)
class Target:
    """A choice of groups to forget: those of a session, those of an API key, or those with an
    id."""

    kind: TargetKind
    value: str
    """Id of a session, fingerprint of an API key, or id of a group or an answer."""


@dataclass(frozen=True, slots=True)
class FoundGroups:
    """The ids of the groups that a Target (a choice of groups to forget) selects."""

    ready: Sequence[str]
    """Groups whose contents can be deleted now."""
    in_flight: Sequence[str]
    """Groups whose rewards the server has not acknowledged yet. Their model calls arrive with the
    acknowledgement."""
    forgotten: Sequence[str]
    """Groups whose contents were deleted before."""


@dataclass(frozen=True, slots=True)
class UsedRanges:
    """Byte ranges of pieces (stored bytes) that were in use when `used_ranges` read the ledger."""

    pieces: PieceRanges
    fence: tuple[int, int]
    """Numbers of the last rows of the tables `group_rows` and `prompts` that were examined."""


class ForgottenGroups:
    """Finds groups, and deletes their contents from the ledger. Also records which of these groups
    the server has not deleted yet. The methods that read block the thread."""

    def __init__(
        self, read_engine: Engine, put: Callable[[Callable[[Connection], None]], WriteReceipt]
    ) -> None:
        """Create the object. `put` is a function that queues a change for the thread that writes
        the ledger."""
        self._read_engine = read_engine
        self._put = put

    def find(self, target: Target) -> FoundGroups:
        """Return the groups that `target` selects. If `target` is a session, the sessions of its
        sub-agents are included."""
        queries = {
            TargetKind.SESSION: _OF_SESSION,
            TargetKind.KEY: _OF_KEY,
            TargetKind.ID: _OF_ID,
        }
        ready: list[str] = []
        in_flight: list[str] = []
        forgotten: list[str] = []
        for group_id, state, is_forgotten in self._rows(
            queries[target.kind].format(_STATE), target.value
        ):
            is_scored = state == State.SCORED
            (forgotten if is_forgotten else in_flight if is_scored else ready).append(group_id)
        return FoundGroups(ready, in_flight, forgotten)

    def versions(self, group_ids: Sequence[str]) -> list[tuple[str | None, int]]:
        """Return the versions of the weights that were trained on these groups, with the ids of
        their runs."""
        ids = _json(group_ids)
        return [(run_id, version) for run_id, version in self._rows(_VERSIONS, ids, ids, ids)]

    def forget(self, group_ids: Sequence[str], cause: Cause, now: float) -> WriteReceipt:
        """Queue the deletion of the contents of a few groups. The pieces (stored bytes) of these
        contents are only noted, and `erase` deletes them later. With the cause PRUNED, a group
        keeps its contents in three cases: it waits to be trained, has feedback that is not
        processed, or has an answer that is kept for a retry."""
        return self._put(partial(_forget, ids=list(group_ids), cause=cause, now=now))

    def loose_pieces(self) -> list[int]:
        """Return the ids of pieces (stored bytes) that may have bytes of deleted contents."""
        return [piece for (piece,) in self._rows(_LOOSE)]

    def used_ranges(self, pieces: Sequence[int]) -> UsedRanges:
        """Return the byte ranges of `pieces` (stored bytes) that contents still use."""
        ranges = PieceRanges(pieces)
        ((*fence,),) = self._rows(_FENCE)
        for query, last in zip(_USES, fence, strict=True):
            first = 0
            while rows := self._rows(query, first, last, ROWS_PER_READ):
                for _, slices_json in rows:
                    ranges.add(_slices(slices_json))
                first = rows[-1][0]
        for (piece,) in self._rows(_RESPONSE_USES, _json(pieces)):
            ranges.add_whole(piece)
        return UsedRanges(ranges, (fence[0], fence[1]))

    def erase(self, pieces: Sequence[int], used: UsedRanges) -> WriteReceipt:
        """Queue a change that erases the unused bytes of a few pieces (stored bytes). `used` is the
        result of `used_ranges` for these pieces, and possibly for others."""
        return self._put(partial(_erase, pieces=list(pieces), used=used))

    def unsent(self, run_id: str, limit: int, among: Sequence[str] | None = None) -> list[str]:
        """Return at most `limit` groups whose contents were deleted here, but not yet at the
        server. Groups of other runs than `run_id` are left out. `among` has the groups to look at;
        None means all."""
        ids = None if among is None else _json(among)
        return [group_id for (group_id,) in self._rows(_UNSENT, run_id, ids, limit)]

    def num_unsent(self, among: Sequence[str] | None = None) -> int:
        """Return the number of groups whose contents were deleted here, but not yet at the server.
        `among` has the groups to look at; None means all."""
        return self._rows(_NUM_UNSENT, None if among is None else _json(among))[0][0]

    def feedback_ids(self, group_ids: Sequence[str]) -> list[tuple[str, str]]:
        """Return the group id and the feedback id of all feedback about these groups."""
        return [(group, name) for group, name in self._rows(_SAMPLES, _json(group_ids))]

    def mark_sent(self, group_ids: Sequence[str]) -> WriteReceipt:
        """Queue a change that records that the server has deleted the calls of these groups."""
        ids = _json(group_ids)
        return self._put(lambda db: _run(db, _MARK_SENT, ids))

    def contains(self, group_id: str) -> bool:
        """Return True if the contents of a group were deleted."""
        return bool(self._rows(_IS_FORGOTTEN, group_id))

    def counts(self) -> dict[str, int]:
        """Return the number of groups whose contents were deleted, for each cause."""
        return {cause: num for cause, num in self._rows(_COUNTS)}

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._read_engine.connect() as db:
            return [tuple(row) for row in db.exec_driver_sql(query, values)]


def is_forgotten(db: Connection, group_id: str | None) -> bool:
    """Return True if the contents of a group were deleted, so that no new contents of the group may
    be written."""
    return dbapi_connection(db).execute(_IS_FORGOTTEN, (group_id,)).fetchone() is not None


def _forget(db: Connection, ids: list[str], cause: Cause, now: float) -> None:
    if cause is Cause.PRUNED:
        # Since the groups were chosen, one of them may have come into use again.
        rows = dbapi_connection(db).execute(_STILL_UNUSED, (_json(ids), now)).fetchall()
        ids = [group_id for (group_id,) in rows]
    ids_json = _json(ids)
    counters.watch(db, ids)
    noted = dbapi_connection(db).execute(_NOTE, (cause.value, now, ids_json))
    counters.add(db, "forgotten", cause.value, noted.rowcount)
    for statement in (_LOOSEN_REQUESTS, _LOOSEN_PROMPTS, _LOOSEN_RESPONSES, *_CLEAR):
        _run(db, statement, ids_json)
    _run(db, _CLEAR_RESPONSES, now, ids_json)
    # No later content may be stored as slices of the contents in memory.
    content_store(db).clear()


def _erase(db: Connection, pieces: list[int], used: UsedRanges) -> None:
    content_store(db).clear()
    driver = dbapi_connection(db)
    for query, last in zip(_NEW_USES, used.fence, strict=True):
        for (slices_json,) in driver.execute(query, (last,)):
            used.pieces.add(_slices(slices_json))
    for (piece,) in driver.execute(_RESPONSE_USES, (_json(pieces),)).fetchall():
        used.pieces.add_whole(piece)
    for piece in pieces:
        row = driver.execute(_PIECE, (piece,)).fetchone()
        if row is not None:
            _erase_piece(db, piece, row[0], used.pieces.kept(piece, row[0]))
        _run(db, _TIGHTEN, piece)


def _slices(slices_json: str | None) -> list[Slice]:
    """Parse the list of the slices of a content. Return [] for a damaged list, because the content
    cannot be read anyway."""
    try:
        found = orjson.loads(slices_json or "[]")
        return [(piece, start, size) for piece, start, size in found]
    except (ValueError, TypeError):  # translated
        return []


def _erase_piece(db: Connection, piece: int, data: bytes, kept: bytes | None) -> None:
    if kept is None:
        _run(db, _DELETE_PIECE, piece)
    elif kept != data:
        _run(db, _OVERWRITE_PIECE, kept, piece)


def _run(db: Connection, statement: str, *values: object) -> None:
    dbapi_connection(db).execute(statement, values)


def _json(values: Sequence[object]) -> str:
    return orjson.dumps(list(values)).decode()
