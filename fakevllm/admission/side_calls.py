"""Which requests are a client's side calls: titles, tags, summaries, commit messages. Pure.

A side call is served once, never trained, and is no turn of its session. What no rule knows is a
main call.
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
"""How side calls begin: opencode's title and its compaction, Open WebUI's tasks (title, tags,
follow-ups, queries), aider's commit message, qwen-code's memory."""
_MAIN = ("### Task:\nRespond to the user query",)
"""Open WebUI's template around a question with files, knowledge or a web search, which a user
asked: it begins as its tasks do."""

MIN_QUOTED_CHARS = 12
"""A shorter text is found inside others by chance."""
MAX_SESSIONS = 10_000
MAX_KEPT_CHARS = 2_000
"""Of a session's first message; a quote of its beginning says as much."""

_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """What earlier main calls of a session tell of the next request."""

    has_tools: bool = False
    system: bytes = b""
    opening: str = ""
    """Text of its first user message."""


@dataclass(frozen=True, slots=True)
class SideCallRules:
    """What the operator says of side calls."""

    models: Sequence[str] = ()
    headers: Sequence[str] = ()
    markers: Sequence[str] = MARKERS
    guesses: Collection[str] = ("no_tools", "marker", "quoted")

    def matching_rule(
        self,
        model: str,
        headers: Mapping[bytes, bytes],
        body: Json,
        session: SessionSummary | None = None,
    ) -> str | None:
        """The rule by which a request is a side call, None for a main call. `model`: as the app
        names it; `headers`: names in lower case; `body`: in chat completions' or completions'
        form; `session`: None where it has no earlier call, or nobody knows."""
        if self.headers and any(has_header(headers, wanted) for wanted in self.headers):
            return "header"
        if self.models and any(fnmatchcase(model, wanted) for wanted in self.models):
            return "model"
        if session is not None and "no_tools" in self.guesses and _lacks_tools(body, session):
            return "no_tools"
        if "marker" in self.guesses and self._begins_marked(body):
            return "marker"
        if session is not None and "quoted" in self.guesses and _quotes(body, session):
            return "quoted"
        return None

    def _begins_marked(self, body: Json) -> bool:
        markers = tuple(self.markers)
        texts = map(str.lstrip, _openers(body))
        return any(text.startswith(markers) and not text.startswith(_MAIN) for text in texts)


class SessionSummaries:
    """The main calls of recent sessions, as far as side calls are known by them."""

    def __init__(self, bound: int = MAX_SESSIONS) -> None:
        self._bound = bound
        self._known: OrderedDict[str, SessionSummary] = OrderedDict()

    def get(self, session_id: str) -> SessionSummary | None:
        return self._known.get(session_id)

    def note(self, session_id: str, body: Json) -> None:
        """A main call. The first one of a session stands; that it had tools is never forgotten."""
        known = self._known.pop(session_id, None)
        has_tools = bool(body.get("tools"))
        if known is None:
            known = SessionSummary(has_tools, _system(body), opening_of(body)[:MAX_KEPT_CHARS])
        elif has_tools and not known.has_tools:
            known = SessionSummary(True, known.system, known.opening)
        self._known[session_id] = known
        if len(self._known) > self._bound:
            self._known.popitem(last=False)


def has_header(headers: Mapping[bytes, bytes], wanted: str) -> bool:
    """
    >>> has_header({b"x-task": b"title"}, "X-Task: ti*"), has_header({}, "X-Task")
    (True, False)
    """
    name, colon, value = wanted.partition(":")
    found = headers.get(name.strip().lower().encode("latin-1"))
    if found is None:
        return False
    return not colon or fnmatchcase(found.decode("latin-1"), value.strip())


def opening_of(body: Json) -> str:
    """The first user message's text, or the prompt."""
    return next((text for role, text in messages_of(body) if role == "user"), "")


def messages_of(body: Json) -> Iterator[tuple[str, str]]:
    """Role and text of each message, whatever an app may have put there; a prompt is a user's."""
    messages: object = body.get("messages")
    prompt: object = body.get("prompt")
    if isinstance(prompt, str):
        yield "user", prompt
    for message in cast(list[Any], messages) if isinstance(messages, list) else ():
        if isinstance(message, dict):
            found = cast(Json, message)
            yield str(found.get("role")), text_of(found.get("content"))


def _openers(body: Json) -> list[str]:
    """The system messages, and the only other message."""
    openers: list[str] = []
    others: list[str] = []
    for role, text in messages_of(body):
        (openers if role in _SYSTEM else others).append(text)
    return openers + others if len(others) == 1 else openers


def _system(body: Json) -> bytes:
    """A key: it is only compared, and system prompts are long."""
    text = "\n".join(text for role, text in messages_of(body) if role in _SYSTEM)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _lacks_tools(body: Json, session: SessionSummary) -> bool:
    """Not where a tool's result was said last: the loop goes on, by an agent that has no tools."""
    if body.get("tools") or not session.has_tools:
        return False
    last = next((role for role, _ in reversed(list(messages_of(body)))), None)
    return last not in ("tool", "function")


def _quotes(body: Json, session: SessionSummary) -> bool:
    """Whether a conversation of its own is about the session's. Who edits a first message quotes
    it too, but under the same system message; and where a system message tells the time, a
    session that was shortened looks so, but has answers."""
    opening = session.opening.strip()
    if len(opening) < MIN_QUOTED_CHARS or body.get("tools") or _system(body) == session.system:
        return False
    said = [(role, text) for role, text in messages_of(body) if role not in _SYSTEM]
    if not said or any(role == "assistant" for role, _ in said):
        return False
    texts = [text for _, text in said]
    return not texts[0].strip().startswith(opening) and opening in "\n".join(texts)
