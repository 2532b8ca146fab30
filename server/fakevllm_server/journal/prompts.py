"""Store the long prompts of captured calls (model calls with their tokens). Calls with the same
prompt share one row. The row lists slices of pieces, which are compressed byte strings that prompts
share. A new prompt adds a piece only for the part that earlier prompts do not have (see
fakevllm_runtime/contents.py).

SQL triggers count the calls of each prompt and the prompts of each piece. The triggers delete a
prompt together with its last call, and a piece together with its last prompt. Therefore any
statement may delete a call without harm to the data of other calls. Ids are never used twice,
because prompts in memory may refer to the ids of deleted rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import orjson
from sqlalchemy import Connection

from fakevllm_runtime.contents import MIN_BYTES, Content, ContentStore
from fakevllm_server.journal.compression import compress_numbers, decompress_numbers
from fakevllm_server.journal.statements import execute

NUM_RECENT = 16
"""Maximum number of recent prompts with which a new prompt is compared. Only recent prompts with
the same beginning are compared. A comparison with only the latest prompt would not be enough,
because several sessions whose prompts begin alike may send requests alternately."""
MAX_RECENT = 64
"""Maximum number of prompts in memory."""
HEAD_BYTES = 256
"""Two prompts are compared only if their first HEAD_BYTES bytes are equal."""
MAX_RECENT_BYTES = 32 * 1024 * 1024
"""Maximum size of the prompts in memory."""

_INSERT = "INSERT INTO prompts (slices) VALUES (?)"
_NEWEST = "SELECT id, slices FROM prompts ORDER BY id DESC LIMIT ?"
_EXISTS = "SELECT 1 FROM prompts WHERE id = ?"
_SLICES = "SELECT slices FROM prompts WHERE id = ?"
_PIECE = "SELECT data FROM pieces WHERE piece_id = ?"
_NUM_FOUND = """
    SELECT COUNT(*) FROM pieces
    WHERE piece_id IN (SELECT json_extract(value, '$[0]') FROM json_each(?))
"""
_FORGET_UNUSED = "DELETE FROM prompts WHERE id = ? AND num_calls = 0"
_OLD_CALLS = "SELECT id FROM calls WHERE length(prompt_ids) >= ? ORDER BY id"
_OLD_PROMPT = "SELECT owner, group_id, prompt_ids FROM calls WHERE id = ?"
_MOVE = "UPDATE calls SET prompt_ids = x'', prompt = ? WHERE id = ?"
_KEY = "recent_prompts"


@dataclass(frozen=True, slots=True)
class _StoredPrompt:
    id: int
    """Id in the table `prompts`."""
    content: Content


class RecentPrompts:
    """The latest prompts, in memory. A prompt may still be in memory when its row in the journal,
    the server's SQLite file, has been deleted."""

    def __init__(self) -> None:
        self._contents = ContentStore(compress=compress_numbers, decompress=decompress_numbers)
        self._by_key: OrderedDict[str, _StoredPrompt] = OrderedDict()
        self._is_loaded = False

    def __len__(self) -> int:
        return len(self._by_key)

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Run the `with` block, which stores prompts in a database transaction. If the block fails,
        remove all prompts from memory, because the rollback of the transaction may have removed
        their rows."""
        try:
            yield
        except BaseException:
            self._by_key.clear()
            raise

    def clear(self) -> None:
        """Remove all prompts from memory, but not from the journal (the server's SQLite file). The
        next `put` first reads the newest prompts of the journal."""
        self._by_key.clear()
        self._is_loaded = False

    def put(self, db: Connection, prompt_ids: bytes, key: str) -> int:
        """Store the prompt of a model call in the journal (the server's SQLite file), unless it is
        there already. Return the id of its row. `key` is the name of the group or the episode to
        which the call belongs."""
        if not self._is_loaded:
            self._load(db)
        own = self._by_key.get(key)
        if own is not None and own.content.data == prompt_ids and _exists(db, own.id):
            self._by_key.move_to_end(key)  # the usual case: a sibling
            return own.id
        candidates = self._candidates(prompt_ids, key)
        for one in candidates:
            if one.content.data == prompt_ids and _exists(db, one.id):
                self._remember(key, one)
                return one.id
        bases = [one.content for one in candidates if _has_pieces(db, one.content)]
        content = self._contents.store(db, prompt_ids, bases)
        inserted = execute(db, _INSERT, (content.slices_json,)).lastrowid
        assert inserted is not None, "an INSERT has a row id"
        prompt = _StoredPrompt(inserted, content)
        self._remember(key, prompt)
        return prompt.id

    def _candidates(self, prompt_ids: bytes, key: str) -> list[_StoredPrompt]:
        """Return the prompts with which a new prompt is compared. The latest prompt of the same
        group or episode comes first. The latest prompts with the same beginning follow."""
        own = self._by_key.get(key)
        head = prompt_ids[:HEAD_BYTES]
        alike = (
            one for one in reversed(self._by_key.values()) if one.content.data.startswith(head)
        )
        others = [one for one in islice(alike, NUM_RECENT) if one is not own]
        return others if own is None else [own, *others]

    def _remember(self, key: str, prompt: _StoredPrompt) -> None:
        self._by_key[key] = prompt
        self._by_key.move_to_end(key)
        while len(self._by_key) > MAX_RECENT or (
            len(self._by_key) > 1
            and sum(len(one.content.data) for one in self._by_key.values()) > MAX_RECENT_BYTES
        ):
            self._by_key.popitem(last=False)

    def _load(self, db: Connection) -> None:
        """Read the journal's newest prompts into memory. An earlier process has stored them.
        Damaged prompts are left out."""
        for number, slices_json in reversed(db.exec_driver_sql(_NEWEST, (NUM_RECENT,)).all()):
            try:
                content = self._contents.load(db, slices_json)
            except ValueError:  # the calls that need it are dropped as corrupt
                continue
            self._remember(f"of an earlier process: {number}", _StoredPrompt(number, content))
        self._is_loaded = True


def recent_prompts(db: Connection) -> RecentPrompts:
    """Return the RecentPrompts object of `db`, the connection that writes the journal."""
    return cast(RecentPrompts, db.info.setdefault(_KEY, RecentPrompts()))


class PromptReader:
    """Reads prompts from the journal, the server's SQLite file. The reader keeps the latest prompt
    in memory, because siblings (answers to the same request) have the same prompt. The reader
    also keeps all pieces (the stored parts of prompts) in memory, because prompts share pieces.
    Create a new reader for each read of the journal."""

    def __init__(self, db: Connection) -> None:
        self._db = db
        self._latest: tuple[int, bytes] | None = None
        self._pieces: dict[int, bytes] = {}

    def read(self, prompt_id: int) -> bytes:
        """Return the prompt of a row of the table `prompts`. Raises ValueError if the prompt is
        missing or damaged."""
        if self._latest is None or self._latest[0] != prompt_id:
            slices = orjson.loads(self._value(_SLICES, prompt_id))
            parts = [self._piece(piece)[start : start + size] for piece, start, size in slices]
            self._latest = (prompt_id, b"".join(parts))
        return self._latest[1]

    def _piece(self, piece_id: int) -> bytes:
        if piece_id not in self._pieces:
            self._pieces[piece_id] = decompress_numbers(self._value(_PIECE, piece_id))
        return self._pieces[piece_id]

    def _value(self, query: str, number: int) -> Any:
        value = self._db.exec_driver_sql(query, (number,)).scalar()
        if value is None:
            raise ValueError("a part of the prompt is missing")
        return value


def forget_unused(db: Connection, prompt_id: int) -> None:
    """Delete a prompt if no stored call uses the prompt. Use this function if a call was not stored
    because it is in the journal already. The prompt was stored before the call, so it may be a
    second copy that no call uses."""
    db.exec_driver_sql(_FORGET_UNUSED, (prompt_id,))


def move_prompts(db: Connection) -> None:
    """Move the long prompts of all captured calls from the journal's table `calls` to its table
    `prompts`."""
    prompts = RecentPrompts()
    for call_id in db.exec_driver_sql(_OLD_CALLS, (MIN_BYTES,)).scalars().all():
        owner, group_id, prompt_ids = db.exec_driver_sql(_OLD_PROMPT, (call_id,)).one()
        db.exec_driver_sql(_MOVE, (prompts.put(db, prompt_ids, group_id or owner), call_id))


def _exists(db: Connection, prompt_id: int) -> bool:
    return execute(db, _EXISTS, (prompt_id,)).fetchone() is not None


def _has_pieces(db: Connection, content: Content) -> bool:
    num_pieces = len({piece for piece, _, _ in content.slices})
    return db.exec_driver_sql(_NUM_FOUND, (content.slices_json,)).scalar() == num_pieces
