"""Recognise side calls. A side call is a request that a client program makes on its own, for
example to generate a title, tags, a summary or a commit message. This module does no I/O.

A side call is sampled once, is never trained, and is not a turn of its session (conversation).
Every request that no rule recognises as a side call is a main call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any, cast

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.formats.chat import text_of

MARKERS = (
    "You are a title generator.",
    "You are a context summarization agent.",
    "### Task:\n",
    "You are an expert software engineer that generates concise, one-line Git commit messages",
    "You are now acting as the managed memory extraction subagent",
)
"""Texts with which known side calls begin: title generation and compaction in opencode; titles,
tags, follow-up questions and search queries in Open WebUI; commit messages in aider; memory
extraction in qwen-code."""
_MAIN_CALL_MARKERS = ("### Task:\nRespond to the user query",)
"""Texts with which some main calls (requests of the user or the agent) begin. A message that begins
with such a text matches no marker of side calls. Open WebUI puts a user's question into a template
with this beginning if files, knowledge or a web search belong to the question. Open WebUI's side
calls begin with similar text.
"""

MIN_QUOTED_CHARS = 12
"""The heuristic `quoted` searches later requests for a session's first user message only if the
message has at least this number of characters. Another text may contain a shorter message by
chance."""
MAX_SESSIONS = 10_000
"""Maximum number of sessions whose summaries are kept."""
MAX_KEPT_CHARS = 2_000
"""Number of characters of a session's first user message that are kept. This number is enough to
recognise a later request that quotes the message."""

_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """Facts about the earlier main calls (requests of the user or the agent) in a session. The
    rules that recognise side calls compare the session's next request with these facts."""

    has_tools: bool = False
    """Whether at least one main call offered tools."""
    system: bytes = b""
    """Hash of the system messages of the first main call."""
    opening: str = ""
    """Text of the first user message."""


@dataclass(frozen=True, slots=True)
class SideCallRules:
    """Rules that recognise side calls (requests that the client program makes on its own, such as
    title generation)."""

    models: Sequence[str] = ()
    """Patterns in the syntax of `fnmatch`. A request is a side call if its model name matches a
    pattern."""
    headers: Sequence[str] = ()
    """Header names, each optionally followed by a colon and a pattern for the value. A request with
    a matching header is a side call."""
    markers: Sequence[str] = MARKERS
    """Texts with which the messages of side calls begin."""
    guesses: Collection[str] = ("no_tools", "marker", "quoted")
    """Names of the active heuristic rules."""

    def matching_rule(
        self,
        model: str,
        headers: Mapping[bytes, bytes],
        body: Json,
        session: SessionSummary | None = None,
    ) -> str | None:
        """Return the name of the rule that recognises a request as a side call. Return None for a
        main call.

        A side call is a request that the client program makes on its own, such as title generation.
        A main call is a request of the user or the agent.

        `model`: model name as the app sent it. `headers`: the app's headers, with names in lower
        case. `body`: the body in the format of chat completions or completions. `session`: summary
        of the earlier main calls in the request's session. None means that the session is unknown
        or has no earlier main call.
        """
        if self.headers and any(has_header(headers, pattern) for pattern in self.headers):
            return "header"
        if self.models and any(fnmatchcase(model, pattern) for pattern in self.models):
            return "model"
        if session is not None and "no_tools" in self.guesses and _lacks_tools(body, session):
            return "no_tools"
        if "marker" in self.guesses and self._has_marker(body):
            return "marker"
        if session is not None and "quoted" in self.guesses and _quotes(body, session):
            return "quoted"
        return None

    def _has_marker(self, body: Json) -> bool:
        markers = tuple(self.markers)
        texts = map(str.lstrip, _marked_messages(body))
        return any(
            text.startswith(markers) and not text.startswith(_MAIN_CALL_MARKERS) for text in texts
        )


class SessionSummaries:
    """Summaries of the main calls of at most `max_sessions` sessions (conversations). When a new
    session exceeds this number, the session that has had no main call for the longest time is
    removed."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._summaries: OrderedDict[str, SessionSummary] = OrderedDict()

    def get(self, session_id: str) -> SessionSummary | None:
        return self._summaries.get(session_id)

    def note(self, session_id: str, body: Json) -> None:
        """Add a main call (a request of the user or the agent) to the summary of its session.

        The summary keeps two parts of the session's first main call: a hash of the system messages,
        and the first user message.

        The field `has_tools` becomes True with the first main call that offers tools, and then
        stays True.
        """
        summary = self._summaries.pop(session_id, None)
        has_tools = bool(body.get("tools"))
        if summary is None:
            opening = opening_of(body)[:MAX_KEPT_CHARS]
            summary = SessionSummary(has_tools, _system_hash(body), opening)
        elif has_tools and not summary.has_tools:
            summary = SessionSummary(True, summary.system, summary.opening)
        self._summaries[session_id] = summary
        if len(self._summaries) > self._max_sessions:
            self._summaries.popitem(last=False)


def has_header(headers: Mapping[bytes, bytes], pattern: str) -> bool:
    """Return True if a request's headers match `pattern`. The pattern is a header name, optionally
    followed by a colon and a pattern for the value. Names in `headers` must be in lower case.

    >>> has_header({b"x-task": b"title"}, "X-Task: ti*"), has_header({}, "X-Task")
    (True, False)
    """
    name, colon, value_pattern = pattern.partition(":")
    value = headers.get(name.strip().lower().encode("latin-1"))
    if value is None:
        return False
    return not colon or fnmatchcase(value.decode("latin-1"), value_pattern.strip())


def opening_of(body: Json) -> str:
    """Return the text of the first user message. If the body has no user message, return the
    prompt, or "" if there is no prompt either.
    """
    return next((text for role, text in messages_of(body) if role == "user"), "")


def messages_of(body: Json) -> Iterator[tuple[str, str]]:
    """Yield (role, text) of each message in a request's body. A prompt counts as a user message.
    Malformed messages cause no error."""
    messages: object = body.get("messages")
    prompt: object = body.get("prompt")
    if isinstance(prompt, str):
        yield "user", prompt
    for message in cast(list[Any], messages) if isinstance(messages, list) else ():
        if isinstance(message, dict):
            fields = cast(Json, message)
            yield str(fields.get("role")), text_of(fields.get("content"))


def _marked_messages(body: Json) -> list[str]:
    """Return the texts of the messages that are searched for a marker (a text with which side calls
    begin).

    All system messages are checked. If the request has exactly one other message, that message is
    searched too.
    """
    system: list[str] = []
    others: list[str] = []
    for role, text in messages_of(body):
        (system if role in _SYSTEM_ROLES else others).append(text)
    return system + others if len(others) == 1 else system


def _system_hash(body: Json) -> bytes:
    """Return a hash of the system messages. The messages are long, so only their hash is kept and
    compared."""
    text = "\n".join(text for role, text in messages_of(body) if role in _SYSTEM_ROLES)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _lacks_tools(body: Json, session: SessionSummary) -> bool:
    """Return True if the request offers no tools, although an earlier main call of its session
    offered tools. Such a request is probably a side call.

    Return False if the last message is the result of a tool. Such a request continues the main
    conversation, even if it offers no tools.
    """
    if body.get("tools") or not session.has_tools:
        return False
    last = next((role for role, _ in reversed(list(messages_of(body)))), None)
    return last not in ("tool", "function")


def _quotes(body: Json, session: SessionSummary) -> bool:
    """Return True if the request only quotes the session's first user message, for example to let
    the model summarise the conversation. Such a request is not part of the conversation.

    Two kinds of requests contain the session's first user message and are still part of the
    conversation. The result for both kinds is False:

    * A request whose first user message was edited. The system messages of such a request are those
      of the session.
    * A request that continues the session with a shortened history. The history includes answers of
      the assistant. The system messages may differ from those of the session, for example if they
      contain the date.
    """
    opening = session.opening.strip()
    if len(opening) < MIN_QUOTED_CHARS or body.get("tools"):
        return False
    if _system_hash(body) == session.system:
        return False
    messages = [(role, text) for role, text in messages_of(body) if role not in _SYSTEM_ROLES]
    if not messages or any(role == "assistant" for role, _ in messages):
        return False
    texts = [text for _, text in messages]
    return not texts[0].strip().startswith(opening) and opening in "\n".join(texts)
