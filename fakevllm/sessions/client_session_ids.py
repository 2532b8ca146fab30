"""Session hints: the names of sessions and users that clients send in headers and request bodies.
This module does no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

Json = dict[str, Any]

_METADATA_SESSION_FIELDS = ("session_id", "conversation_id", "thread_id", "chat_id")
"""Fields of a body's `metadata` that name a session."""
_HEADERS = frozenset(
    {
        *(b"x-session-id", b"x-session-affinity", b"x-claude-code-session-id", b"session-id"),
        *(b"thread-id", b"x-openwebui-chat-id", b"x-openwebui-user-id"),
    }
)
_FIELDS = frozenset(
    {"user", "metadata", "conversation", "prompt_cache_key", "previous_response_id"}
)
"""Body fields that may contain hints. A request without these fields and without the headers in
`_HEADERS` has no hints."""
_CLAUDE_SESSION = re.compile(r"session_(?:id\W+)?([0-9a-f-]{36})")
_MAX_CHARS = 512
"""Maximum length of a name; the rest is cut off."""


@dataclass(frozen=True, slots=True)
class Hints:
    """The names in a request that identify its session, its user, and the answer that it continues.

    >>> hints_of({b"x-session-id": b"ses_1", b"x-parent-session-id": b"ses_0"}, {})
    Hints(session='ses_1', parent='ses_0', is_header=True, user='', cache_key='', \
response_id=None, is_retry=False)
    """

    session: str | None = None
    parent: str | None = None
    """Name of the session that started this session."""
    is_header: bool = False
    """Whether a header names the session. False if a field of the body names the session."""
    user: str = ""
    """Name of the user, who may have many sessions. A request is never matched with a session of
    another user."""
    cache_key: str = ""
    """The field `prompt_cache_key`. Some apps send a different key for each conversation, other
    apps always send the same key."""
    response_id: str | None = None
    """The `previous_response_id`, which is the id of the answer that the request continues."""
    is_retry: bool = False
    """Whether the request is marked as a retry by the client's library."""


NO_HINTS = Hints()
_RETRY_HINT = Hints(is_retry=True)


def hints_of(headers: Mapping[bytes, bytes], body: Json | None) -> Hints:
    """Return the session hints of a request: the names of its session, of its user, and of the
    answer that it continues. This function never raises.

    The header names in `headers` are in lower case. `body` is the request body as the app sent it.
    """
    if _HEADERS.isdisjoint(headers) and _FIELDS.isdisjoint(body or ()):
        return _RETRY_HINT if _is_retry(headers) else NO_HINTS
    session, parent = _sessions_in_headers(headers)
    is_header = session is not None
    user = _header(headers, b"x-openwebui-user-id") or ""
    if not body:
        return Hints(session, parent, is_header, user, is_retry=_is_retry(headers))
    user = user or _name(body.get("user")) or ""
    metadata: object = body.get("metadata")
    if isinstance(metadata, dict):
        fields = cast(Json, metadata)
        account = _name(fields.get("user_id")) or ""
        match = _CLAUDE_SESSION.search(account)
        names = [match[1] if match else None]
        names += [_name(fields.get(field)) for field in _METADATA_SESSION_FIELDS]
        session = session or next(filter(None, names), None)
        user = user or ("" if match else account)
    conversation: object = body.get("conversation")
    if isinstance(conversation, dict):
        conversation = cast(Json, conversation).get("id")
    return Hints(
        session=session or _name(conversation),
        parent=parent,
        is_header=is_header,
        user=user,
        cache_key=_name(body.get("prompt_cache_key")) or "",
        response_id=_name(body.get("previous_response_id")),
        is_retry=_is_retry(headers),
    )


def _sessions_in_headers(headers: Mapping[bytes, bytes]) -> tuple[str | None, str | None]:
    """Return a pair: the name of the session, and the name of the session that started it (its
    parent). A name is None if the headers do not contain it."""
    if session := _header(headers, b"x-session-id") or _header(headers, b"x-session-affinity"):
        return session, _header(headers, b"x-parent-session-id")
    if session := _header(headers, b"x-claude-code-session-id"):
        agent = _header(headers, b"x-claude-code-agent-id")
        if agent is None:
            return session, None
        parent_agent = _header(headers, b"x-claude-code-parent-agent-id")
        return f"{session}/{agent}", f"{session}/{parent_agent}" if parent_agent else session
    thread = _header(headers, b"thread-id")
    if session := _header(headers, b"session-id"):
        return thread or session, session if thread not in (None, session) else None
    return thread or _header(headers, b"x-openwebui-chat-id"), None


def _header(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return _name(value.decode("latin-1")) if value else None


def _name(value: object) -> str | None:
    return value[:_MAX_CHARS] if isinstance(value, str) and value else None


def _is_retry(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"x-stainless-retry-count", b"0") not in (b"", b"0")
