"""Choose the earlier contents with which a new request or prompt is compared, and store what it
does not share with them.

A request shares most with the request whose answer it continues, and with the latest request of the
same app and route, which often has the same system prompt and tools. A prompt shares all with the
prompts of its group, and most with those of the group before.
"""

from __future__ import annotations

import itertools
from base64 import b64decode

from sqlalchemy import Connection

from fakevllm_runtime.contents import MIN_BYTES, Content, content_store

StoredContent = tuple[str | None, bytes | None]
"""The values of the columns for the slices and the digest. Both are None if the content is stored
in its row."""
IN_ROW: StoredContent = (None, None)

_REQUEST = "SELECT request_slices FROM group_rows WHERE group_id = ?"
_PROMPT = """
    SELECT prompt_slices FROM call_rows WHERE group_id = ? AND prompt_slices IS NOT NULL
    ORDER BY sibling, seq LIMIT 1
"""
_PLACE = "SELECT parent_id, app_key, route FROM group_rows WHERE group_id = ?"
_LONG_REQUESTS = """
    SELECT rowid FROM group_rows WHERE length(request_json) >= ? ORDER BY received_at, group_id
"""
_OLD_REQUEST = """
    SELECT group_id, parent_id, app_key, route, request_json FROM group_rows WHERE rowid = ?
"""
_LONG_PROMPTS = """
    SELECT c.rowid, c.group_id FROM call_rows AS c JOIN group_rows AS g USING (group_id)
    WHERE length(c.prompt_ids) >= ? ORDER BY g.received_at, c.group_id, c.sibling, c.seq
"""
_OLD_PROMPT = "SELECT prompt_ids FROM call_rows WHERE rowid = ?"
_MOVE_REQUEST = """
    UPDATE group_rows SET request_json = '', request_slices = ?, request_digest = ?
    WHERE rowid = ?
"""
_MOVE_PROMPT = """
    UPDATE call_rows SET prompt_ids = x'', prompt_slices = ?, prompt_digest = ? WHERE rowid = ?
"""


def put_request(
    db: Connection,
    group_id: str,
    parent_id: str | None,
    app_key: str | None,
    route: str,
    text: str,
) -> StoredContent:
    """Store a request, and return the values of its row's columns."""
    data = text.encode()
    if len(data) < MIN_BYTES:
        return IN_ROW
    store = content_store(db)
    of_app = f"request of {app_key} at {route}"
    bases = _bases(db, "request", parent_id, of_app, _REQUEST)
    content = store.store(db, data, bases)
    store.remember(f"request {group_id}", content)
    store.remember(of_app, content)
    return content.slices_json, content.digest


class PromptContents:
    """Stores the prompts of a group's calls, in the order of the calls. The group's row must be
    stored before."""

    def __init__(self, db: Connection, group_id: str) -> None:
        self._db = db
        self._group_id = group_id
        self._previous: list[Content] = []
        self._prompt: str | bytes | None = None
        self._columns: tuple[bytes, str | None, bytes | None] = (b"", *IN_ROW)

    def columns(self, prompt: str | bytes) -> tuple[bytes, str | None, bytes | None]:
        """Return the values of the columns `prompt_ids`, `prompt_slices` and `prompt_digest` of the
        next call. `prompt` has its token ids as int32, or their base64. The calls of a group often
        have the same prompt, which is stored once."""
        if prompt != self._prompt:
            prompt_ids = b64decode(prompt) if isinstance(prompt, str) else prompt
            slices_json, digest = self.put(prompt_ids)
            self._prompt = prompt
            self._columns = (prompt_ids if slices_json is None else b"", slices_json, digest)
        return self._columns

    def put(self, prompt_ids: bytes) -> StoredContent:
        """Store the prompt of the next call, and return the values of its row's columns."""
        if len(prompt_ids) < MIN_BYTES:
            return IN_ROW
        store = content_store(self._db)
        if self._previous:
            content = store.store(self._db, prompt_ids, self._previous)
        else:
            place = self._db.exec_driver_sql(_PLACE, (self._group_id,)).one()
            parent_id, app_key, route = place
            of_app = f"prompt of {app_key} at {route}"
            bases = _bases(self._db, "prompt", parent_id, of_app, _PROMPT)
            content = store.store(self._db, prompt_ids, bases)
            store.remember(f"prompt {self._group_id}", content)
            store.remember(of_app, content)
        self._previous = [content]
        return content.slices_json, content.digest


def _bases(
    db: Connection, kind: str, parent_id: str | None, of_app: str, parent_query: str
) -> list[Content]:
    """Return the contents of the parent group and of the app's latest group, if they are known. The
    content of the parent is read from the file if it is not in memory."""
    store = content_store(db)
    bases = [store.find(of_app)]
    if parent_id is not None:
        parent = store.find(f"{kind} {parent_id}")
        slices_json = None
        if parent is None:
            slices_json = db.exec_driver_sql(parent_query, (parent_id,)).scalar()
        bases.append(parent if slices_json is None else store.load(db, slices_json))
    return [base for base in bases if base is not None]


def move_contents(db: Connection) -> None:
    """Move the long requests and prompts of all rows to pieces. Shorter ones stay in their
    rows."""
    store = content_store(db)
    for rowid in db.exec_driver_sql(_LONG_REQUESTS, (MIN_BYTES,)).scalars().all():
        row = db.exec_driver_sql(_OLD_REQUEST, (rowid,)).one()
        db.exec_driver_sql(_MOVE_REQUEST, (*put_request(db, *row), rowid))
    for group_id, rows in itertools.groupby(
        db.exec_driver_sql(_LONG_PROMPTS, (MIN_BYTES,)).all(), lambda row: row[1]
    ):
        prompts = PromptContents(db, group_id)
        for rowid, _ in rows:
            prompt_ids = db.exec_driver_sql(_OLD_PROMPT, (rowid,)).scalar_one()
            db.exec_driver_sql(_MOVE_PROMPT, (*prompts.put(prompt_ids), rowid))
    store.clear()
