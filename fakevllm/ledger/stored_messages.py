"""Store the message of a sibling (sampled answer) without its text and its tool calls. These two
parts have columns of their own. The SQL view `siblings` puts the text and the tool calls back into
the message.

A part is left out only if SQL can restore the part byte by byte. The text is left out only if the
message encodes it as SQLite's `json_quote` does. The tool calls are left out only if the message
and the column contain the same bytes. So the view returns each message exactly as it was recorded.
"""

from __future__ import annotations

import re

import orjson
from sqlalchemy import Connection

StoredMessage = tuple[str | None, int | None, int | None]
"""The message without its text and its tool calls, the index at which the text is inserted, and the
index at which the tool calls are inserted. An index is None if its part stays in the message."""

MIN_CHARS = 32
"""Minimum number of characters of a part that is left out. Shorter parts stay in the message."""
_UNSAFE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
"""Control characters that different versions of SQLite may encode differently. One of them is NUL,
at which SQLite may cut a text off."""

_OLD_MESSAGES = """
    SELECT rowid, message_json, text, tool_calls_json FROM sibling_rows
    WHERE message_json IS NOT NULL AND rowid > ? ORDER BY rowid LIMIT 1000
"""
_MOVE_MESSAGE = """
    UPDATE sibling_rows SET message_json = ?, text_at = ?, tool_calls_at = ? WHERE rowid = ?
"""


def stored_message(
    message_json: str | None, text: str | None, tool_calls_json: str | None
) -> StoredMessage:
    r"""Return the values of the columns in which a message is stored.

    The first value is the message's JSON without the text and the tool calls. The other two values
    are positions in this JSON. SQL inserts the text at the first position, and the tool calls at
    the second one. A position is None if the part was not left out.

    >>> text = "a line\n" * 9
    >>> stored_message(orjson.dumps({"content": text}).decode(), text, None)
    ('{"content":}', 11, None)
    """
    if message_json is None or _UNSAFE.search(message_json):
        return message_json, None, None
    message_json, text_at = _without(message_json, _quoted(text))
    message_json, tool_calls_at = _without(message_json, tool_calls_json or "")
    return message_json, text_at, tool_calls_at


def _quoted(text: str | None) -> str:
    """Return the text as `json_quote` encodes it. Return "" if it cannot be encoded."""
    if not text or _UNSAFE.search(text):
        return ""
    try:
        return orjson.dumps(text).decode()
    except orjson.JSONEncodeError:  # a half of a surrogate pair
        return ""


def _without(message_json: str, part: str) -> tuple[str, int | None]:
    at = message_json.find(part) if len(part) >= MIN_CHARS else -1
    return (message_json, None) if at < 0 else (message_json.replace(part, "", 1), at)


def move_messages(db: Connection) -> None:
    """Convert the rows that an older version of fakevllm has written: remove the texts and the tool
    calls from their messages."""
    last = 0
    while rows := db.exec_driver_sql(_OLD_MESSAGES, (last,)).all():
        for rowid, *parts in rows:
            message = stored_message(*parts)
            if message[1:] != (None, None):
                db.exec_driver_sql(_MOVE_MESSAGE, (*message, rowid))
        last = rows[-1].rowid
