"""Delete the captured calls of forgotten groups, so that no byte of the calls stays in the journal.

The journal stores bytes in pieces. A prompt is stored as a list of byte ranges in such pieces, and
several prompts may share a piece. The triggers of the tables (see prompts.py) delete a prompt with
its last call, and a piece with its last prompt. If a prompt is deleted and another prompt uses the
same piece, the piece stays. It is noted as a loose piece, because it may have bytes that no prompt
uses.

This module overwrites such bytes, a few pieces at a time. `used_ranges` finds the bytes that
prompts use. The journal can be written while `used_ranges` runs. Therefore each change of
`unused_bytes_erased` also reads the prompts that were added since then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
from sqlalchemy import Connection

from fakevllm_adapters.protocol.forgetting import FORGOTTEN
from fakevllm_runtime.piece_ranges import PieceRanges
from fakevllm_server.journal import reads
from fakevllm_server.journal.compression import compress_numbers, decompress_numbers
from fakevllm_server.journal.group_commit_writer import Change
from fakevllm_server.journal.prompts import recent_prompts
from fakevllm_server.journal.statements import execute, execute_many
from fakevllm_server.journal.store import Journal
from fakevllm_server.journal.tables import GroupState

PROMPTS_PER_READ = 5_000
"""Number of prompts that one read examines, because other reads wait for it."""

_OF_GROUPS = """
    (group_id IN (SELECT value FROM json_each(?1)) OR owner IN
     (SELECT owner FROM samples WHERE group_id IN (SELECT value FROM json_each(?1))))
"""
_DELETE = f"DELETE FROM calls WHERE {_OF_GROUPS}"
_MARK = f"""
    UPDATE groups SET reason = '{FORGOTTEN}' WHERE state IN (?2, ?3)
    AND group_id IN (SELECT value FROM json_each(?1))
"""
_LOOSE = "SELECT piece_id, num_deleted FROM loose_pieces ORDER BY piece_id"
_LEFT = """
    SELECT piece_id, data FROM pieces WHERE piece_id IN (SELECT value FROM json_each(?))
"""
_LAST_PROMPT = "SELECT COALESCE(MAX(id), 0) FROM prompts"
_USES = "SELECT id, slices FROM prompts WHERE id > ? AND id <= ? ORDER BY id LIMIT ?"
_NEW_USES = "SELECT slices FROM prompts WHERE id > ?"
_OVERWRITE = "UPDATE pieces SET data = ? WHERE piece_id = ?"
_TIGHTEN = "DELETE FROM loose_pieces WHERE piece_id = ? AND num_deleted = ?"
_NUM_CALLS = f"SELECT COUNT(*) FROM calls WHERE {_OF_GROUPS}"
_VERSIONS = """
    SELECT MAX(version) FROM entries WHERE kind = 'step' AND step IN
    (SELECT step FROM groups WHERE state = ?2 AND group_id IN (SELECT value FROM json_each(?1)))
    GROUP BY step ORDER BY 1
"""
_TRAINED_CALLS = """
    SELECT g.group_id, COALESCE((SELECT MAX(at) FROM publications AS p WHERE p.step = g.step), 0),
           SUM(length(c.prompt_ids) + length(c.response_ids) + COALESCE(length(c.logprobs), 0)
               + length(c.facts_json))
    FROM groups AS g JOIN samples AS s USING (group_id) JOIN calls AS c ON c.owner = s.owner
    WHERE g.state = ? AND g.step > ? AND g.step <= (SELECT MAX(step) FROM checkpoints)
    GROUP BY g.group_id ORDER BY g.step, g.seq LIMIT ?
"""
_BATCHED = """
    SELECT state, step FROM groups WHERE state IN (?2, ?3)
    AND group_id IN (SELECT value FROM json_each(?1))
"""


LoosePiece = tuple[int, int]
"""The id of a loose piece, and the number of its deleted prompts when it was read."""


@dataclass(frozen=True, slots=True)
class TrainedCalls:
    """A trained group whose captured calls are still in the journal, with the size of these
    calls."""

    group_id: str
    trained_at: float
    """Unix time at which the weights of the group's step were published."""
    num_bytes: int
    """Approximate size of the calls, without prompts that calls share."""


@dataclass(frozen=True, slots=True)
class UsedRanges:
    """The byte ranges of stored pieces (blocks of bytes) that prompts used when the prompts were
    read."""

    ranges: PieceRanges
    last_prompt: int
    """Id of the last prompt that was examined."""


def calls_forgotten(group_ids: Sequence[str]) -> Change:
    """Return a Change (a write to the journal) that deletes the captured calls of groups. The
    Change also marks the groups that are in a batch. If this batch is trained again after a crash,
    the marked groups are left out."""
    ids = json.dumps(list(group_ids))

    def apply(db: Connection) -> None:
        execute(db, _DELETE, (ids,))
        execute(db, _MARK, (ids, GroupState.CONSUMED, GroupState.PLANNED))
        # No later prompt may be stored as slices of the prompts in memory.
        recent_prompts(db).clear()

    return Change("forget", apply)


def unused_bytes_erased(pieces: Sequence[LoosePiece], used: UsedRanges) -> Change:
    """Return a Change (a write to the journal) that overwrites the unused bytes of some loose
    pieces. A loose piece is a stored block of bytes that lost one of its prompts. Bytes are unused
    if no prompt uses them. `used` is the result of `used_ranges` for these pieces, and may cover
    further pieces."""

    def apply(db: Connection) -> None:
        recent_prompts(db).clear()
        ids = json.dumps([piece for piece, _ in pieces])
        for (slices,) in execute(db, _NEW_USES, (used.last_prompt,)):
            used.ranges.add(orjson.loads(slices))
        for piece, compressed in execute(db, _LEFT, (ids,)).fetchall():
            data = decompress_numbers(compressed)
            kept = used.ranges.kept(piece, data)
            # None: the piece's last prompt is deleted by triggers, together with the piece.
            if kept is not None and kept != data:
                execute(db, _OVERWRITE, (compress_numbers(kept), piece))
        execute_many(db, _TIGHTEN, pieces)

    return Change("erase", apply)


def loose_pieces(db: Connection) -> list[LoosePiece]:
    """Return the loose pieces: stored blocks of bytes that may have bytes which no prompt uses."""
    return [(piece, num_deleted) for piece, num_deleted in execute(db, _LOOSE)]


def used_ranges(journal: Journal, pieces: Sequence[LoosePiece]) -> UsedRanges:
    """Find the byte ranges of `pieces` (stored blocks of bytes) that prompts use. The function
    blocks the thread. It reads the prompts in several parts, and other reads of the journal can run
    between these parts."""
    ranges = PieceRanges([piece for piece, _ in pieces])
    last, after = journal.read(_last_prompt), 0
    while rows := journal.read(_prompt_slices, after, last):
        for _, slices in rows:
            ranges.add(orjson.loads(slices))
        after = rows[-1][0]
    return UsedRanges(ranges, last)


def _last_prompt(db: Connection) -> int:
    return execute(db, _LAST_PROMPT).fetchone()[0]


def _prompt_slices(db: Connection, after: int, last: int) -> list[tuple[int, str]]:
    """Return (id, slices as JSON) of the next prompts after the id `after`, up to the id `last`. At
    most PROMPTS_PER_READ prompts are returned."""
    return [(id, slices) for id, slices in execute(db, _USES, (after, last, PROMPTS_PER_READ))]


def num_calls(db: Connection, group_ids: Sequence[str]) -> int:
    """Return the number of captured calls of the groups `group_ids`."""
    return execute(db, _NUM_CALLS, (json.dumps(list(group_ids)),)).fetchone()[0]


def trained_calls(db: Connection, limit: int) -> list[TrainedCalls]:
    """Return at most `limit` trained groups whose calls are still in the journal, oldest first. A
    restart from the newest checkpoint does not need these calls."""
    values = (GroupState.CONSUMED, reads.last_pruned(db), limit)
    return [TrainedCalls(*row) for row in execute(db, _TRAINED_CALLS, values)]


def trained_versions(db: Connection, group_ids: Sequence[str]) -> list[int]:
    """Return the versions of the weights that training on the groups `group_ids` made, oldest
    first."""
    values = (json.dumps(list(group_ids)), GroupState.CONSUMED)
    return [version for (version,) in execute(db, _VERSIONS, values)]


def last_batched_step(db: Connection, group_ids: Sequence[str]) -> tuple[int, bool]:
    """Return a pair. The first item is the last step that trained one of the groups `group_ids`, or
    0 if there is none. The second item is True if one of these groups is in a batch that is planned
    and not trained yet."""
    values = (json.dumps(list(group_ids)), GroupState.CONSUMED, GroupState.PLANNED)
    rows = execute(db, _BATCHED, values).fetchall()
    trained = [step for state, step in rows if state == GroupState.CONSUMED]
    return max(trained, default=0), len(trained) < len(rows)
