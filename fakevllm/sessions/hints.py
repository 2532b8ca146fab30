"""What a request says of itself: names of its session, where its client sends one. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

Json = dict[str, Any]

_CONVERSATIONS = ("session_id", "conversation_id", "thread_id", "chat_id")
"""Of a body's `metadata`."""
_HEADERS = frozenset(
    {
        *(b"x-session-id", b"x-session-affinity", b"x-claude-code-session-id", b"session-id"),
        *(b"thread-id", b"x-openwebui-chat-id", b"x-openwebui-user-id"),
    }
)
_FIELDS = frozenset(
    {"user", "metadata", "conversation", "prompt_cache_key", "previous_response_id"}
)
"""Without one of these and those there are no hints."""
_CLAUDE_SESSION = re.compile(r"session_(?:id\W+)?([0-9a-f-]{36})")
_LONGEST = 512


@dataclass(frozen=True, slots=True)
class Hints:
    """
    >>> hints_of({b"x-session-id": b"ses_1", b"x-parent-session-id": b"ses_0"}, {})
    Hints(session='ses_1', parent='ses_0', is_header=True, user='', cache_key='', answer=None, \
is_retry=False)
    """

    session: str | None = None
    parent: str | None = None
    """The session that started this one."""
    is_header: bool = False
    """Whether the session is named by a header, not in the body."""
    user: str = ""
    """Somebody who may have many sessions: keeps apart what is alike."""
    cache_key: str = ""
    """Some apps make one a conversation, some only one at all."""
    answer: str | None = None
    """The response id the request stands on."""
    is_retry: bool = False
    """A client's library sends it again."""


NO_HINTS = Hints()
_RETRIED = Hints(is_retry=True)


def hints_of(headers: Mapping[bytes, bytes], body: Json | None) -> Hints:
    """Header names in lower case; `body` in the app's own format. Never raises."""
    if _HEADERS.isdisjoint(headers) and _FIELDS.isdisjoint(body or ()):
        return _RETRIED if _is_retry(headers) else NO_HINTS
    session, parent = _of_headers(headers)
    is_header = session is not None
    user = _header(headers, b"x-openwebui-user-id") or ""
    if not body:
        return Hints(session, parent, is_header, user, is_retry=_is_retry(headers))
    user = user or _word(body.get("user")) or ""
    told: object = body.get("metadata")
    if isinstance(told, dict):
        metadata = cast(Json, told)
        account = _word(metadata.get("user_id")) or ""
        found = _CLAUDE_SESSION.search(account)
        names = [found[1] if found else None, *(_word(metadata.get(k)) for k in _CONVERSATIONS)]
        session = session or next(filter(None, names), None)
        user = user or ("" if found else account)
    conversation: object = body.get("conversation")
    if isinstance(conversation, dict):
        conversation = cast(Json, conversation).get("id")
    return Hints(
        session or _word(conversation),
        parent,
        is_header,
        user,
        _word(body.get("prompt_cache_key")) or "",
        _word(body.get("previous_response_id")),
        _is_retry(headers),
    )


def _of_headers(headers: Mapping[bytes, bytes]) -> tuple[str | None, str | None]:
    """Session and parent session."""
    if session := _header(headers, b"x-session-id") or _header(headers, b"x-session-affinity"):
        return session, _header(headers, b"x-parent-session-id")
    if session := _header(headers, b"x-claude-code-session-id"):
        agent = _header(headers, b"x-claude-code-agent-id")
        if agent is None:
            return session, None
        above = _header(headers, b"x-claude-code-parent-agent-id")
        return f"{session}/{agent}", f"{session}/{above}" if above else session
    thread = _header(headers, b"thread-id")
    if session := _header(headers, b"session-id"):
        return thread or session, session if thread not in (None, session) else None
    return thread or _header(headers, b"x-openwebui-chat-id"), None


def _header(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return _word(value.decode("latin-1")) if value else None


def _word(value: object) -> str | None:
    return value[:_LONGEST] if isinstance(value, str) and value else None


def _is_retry(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"x-stainless-retry-count", b"0") not in (b"", b"0")
