"""Choose the earlier contents with which a new request or prompt is compared, and store only the
parts that differ.

A request usually repeats most of one of two earlier requests:

* the request whose answer it continues
* the latest request of the same app and route, which often has the same system prompt and tools

The calls of a group usually all have the same prompt. This prompt usually begins with the prompt of
the previous group, followed by the served answer of the previous group.
"""

from __future__ import annotations

import itertools
from typing import cast

from sqlalchemy import Connection

from fakevllm_runtime.contents import MIN_BYTES, Content, content_store, dbapi_connection

StoredContent = tuple[str | None, bytes | None]
"""The values of the two columns `request_slices` and `request_digest`. Both values are None if the
whole request is stored in its row."""
IN_ROW: StoredContent = (None, None)

_REQUEST = "SELECT request_slices FROM group_rows WHERE group_id = ?"
_CALL = """
    SELECT q.slices, c.response_piece, length(p.data) FROM call_rows AS c
    JOIN prompts AS q ON q.prompt_id = c.prompt
    LEFT JOIN pieces AS p ON p.piece_id = c.response_piece
    WHERE c.group_id = ? ORDER BY c.response_piece DESC, c.sibling, c.seq LIMIT 1
"""
"""Query for the prompt and the response of one call of a group. The query prefers the calls whose
response is stored as a piece. Among these, it selects the call with the newest piece."""
_PLACE = "SELECT parent_id, app_key, route, served_index FROM group_rows WHERE group_id = ?"
_INSERT_PROMPT = "INSERT INTO prompts (slices, digest) VALUES (?, ?)"
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
_OLD_CALL = "SELECT sibling, prompt_ids, response_ids FROM call_rows WHERE rowid = ?"
_MOVE_REQUEST = """
    UPDATE group_rows SET request_json = '', request_slices = ?, request_digest = ?
    WHERE rowid = ?
"""
_MOVE_CALL = """
    UPDATE call_rows SET prompt_ids = x'', prompt = ?1, response_piece = ?2,
    response_ids = CASE WHEN ?2 IS NULL THEN response_ids ELSE x'' END WHERE rowid = ?3
"""


def put_request(
    db: Connection,
    group_id: str,
    parent_id: str | None,
    app_key: str | None,
    route: str,
    text: str,
) -> StoredContent:
    """Store a request. Return the values of the columns `request_slices` and `request_digest`.

    Both values are None if the request is short and must be stored whole in its row.
    """
    data = text.encode()
    if len(data) < MIN_BYTES:
        return IN_ROW
    store = content_store(db)
    of_app = f"request of {app_key} at {route}"
    bases = [store.find(of_app), _request_of(db, parent_id)]
    content = store.store(db, data, [base for base in bases if base is not None])
    store.remember(f"request {group_id}", content)
    store.remember(of_app, content)
    return content.slices_json, content.digest


def _request_of(db: Connection, group_id: str | None) -> Content | None:
    """Return the request of a group, from memory or from the ledger file. Return None if there is
    no such request, or if the request is stored whole in the group's row."""
    if group_id is None:
        return None
    store = content_store(db)
    slices_json = None
    request = store.find(f"request {group_id}")
    if request is None:
        slices_json = db.exec_driver_sql(_REQUEST, (group_id,)).scalar()
    return request if slices_json is None else store.load(db, slices_json)


class CallContents:
    """Stores the prompts of a group's calls, and the responses that the app got. Store the group's
    row before you create this object. Then call `put` for each call, in the order of the calls."""

    def __init__(self, db: Connection, group_id: str) -> None:
        self._db = db
        self._group_id = group_id
        self._store = content_store(db)
        self._prompts: list[tuple[Content, int]] = []
        """The group's latest prompt with its id; empty before the first prompt."""
        self._driver = dbapi_connection(db)
        place = self._driver.execute(_PLACE, (group_id,)).fetchone()
        parent_id, app_key, route, served_index = place
        self._parent_id = parent_id
        self._of_app = f"prompt of {app_key} at {route}"
        self._served_index = served_index

    def put(
        self, sibling: int, prompt_ids: bytes, response_ids: bytes
    ) -> tuple[int | None, int | None]:
        """Store the prompt and the response of the next call. Return the id of the stored prompt,
        and the id of the piece (stored bytes) that has the response. If an id is None, the caller
        must store the prompt or the response in the call's row."""
        if len(prompt_ids) < MIN_BYTES:
            return None, None
        prompt, prompt_id = self._put_prompt(prompt_ids)
        if sibling != self._served_index or len(response_ids) < MIN_BYTES:
            return prompt_id, None
        response = self._store.store(self._db, response_ids, [])
        # The next prompt of the session begins with this prompt and this response.
        self._store.remember(f"prompt {self._group_id}", prompt.followed_by(response))
        return prompt_id, response.slices[0][0]

    def _put_prompt(self, prompt_ids: bytes) -> tuple[Content, int]:
        for prompt, prompt_id in self._prompts:
            if prompt.data == prompt_ids:
                return prompt, prompt_id
        bases = [prompt for prompt, _ in self._prompts] or self._bases()
        content = self._store.store(self._db, prompt_ids, bases)
        if not self._prompts:
            self._store.remember(f"prompt {self._group_id}", content)
            self._store.remember(self._of_app, content)
        row = (content.slices_json, content.digest)
        prompt_id = cast(int, self._driver.execute(_INSERT_PROMPT, row).lastrowid)
        self._prompts = [(content, prompt_id)]
        return content, prompt_id

    def _bases(self) -> list[Content]:
        """Return the earlier contents with which a new prompt is compared. The first is the app's
        latest prompt. The second is the prompt and the response of the parent (the request whose
        answer this group's request continues). Contents that are not found are left out."""
        bases = [self._store.find(self._of_app), self._parent()]
        return [base for base in bases if base is not None]

    def _parent(self) -> Content | None:
        if self._parent_id is None:
            return None
        found = self._store.find(f"prompt {self._parent_id}")
        if found is not None:
            return found
        row = self._driver.execute(_CALL, (self._parent_id,)).fetchone()
        if row is None:
            return None
        slices_json, piece_id, num_bytes = row
        prompt = self._store.load(self._db, slices_json)
        if piece_id is None:
            return prompt
        response = self._store.load(self._db, f"[[{piece_id}, 0, {num_bytes}]]")
        return prompt.followed_by(response)


def move_contents(db: Connection) -> None:
    """Move all long requests and prompts from their rows to pieces (stored bytes that several
    contents may share). Short requests and prompts stay in their rows."""
    store = content_store(db)
    for rowid in db.exec_driver_sql(_LONG_REQUESTS, (MIN_BYTES,)).scalars().all():
        row = db.exec_driver_sql(_OLD_REQUEST, (rowid,)).one()
        db.exec_driver_sql(_MOVE_REQUEST, (*put_request(db, *row), rowid))
    for group_id, rows in itertools.groupby(
        db.exec_driver_sql(_LONG_PROMPTS, (MIN_BYTES,)).all(), lambda row: row[1]
    ):
        contents = CallContents(db, group_id)
        for rowid, _ in rows:
            call = db.exec_driver_sql(_OLD_CALL, (rowid,)).one()
            db.exec_driver_sql(_MOVE_CALL, (*contents.put(*call), rowid))
    store.clear()
