"""A history as keys: equal for all the ways in which clients repeat what they were told.

Clients parse what they got and write it anew, so bytes say little. What counts is who spoke, the
text, the calls with their arguments as values, pictures by what is sent of them. What comes and
goes does not count: ids, system prompts (they tell the date), thoughts, `cache_control`, reminders
that coding agents mix in, messages that say nothing.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import orjson

from fakevllm_adapters.formats.chat import text_of

Json = dict[str, Any]

KEY_BYTES = 16
SYSTEM_CHARS = 256
"""Of the system prompt: enough to tell apps apart, and mostly before the date."""
LONG_ANSWER = 40
"""Characters above which an answer alone tells its session; calls do at any length."""

_REMINDERS = ("<system-reminder>", "</system-reminder>")
_THOUGHTS = (("<think>", "</think>"), ('<details type="reasoning"', "</details>"))
_FLOATS = re.compile(r"\d(?:\.0|[eE])")
_WHOLE = 2.0**53
_CALLS_AS_TEXT = "Calling tools:"
_IDS_IN_TEXT = re.compile(r"'id': '([^']+)'")
_ROLES = {"assistant": "assistant", "tool": "tool", "function": "tool"}
"""All others are a user's."""
_NOT_A_USERS = (
    "Observation:",  # smolagents: a tool's result
    "I have *added these files to the chat*",  # aider, from here on
    "I am not sharing any files that you can edit yet",
    "Here are summaries of some files present in my git repository",
    "Here are some READ ONLY files",
    "I switched to a new code base.",
    "Continue if you have next steps",  # opencode, after it shortened a history by itself
)
_WITH_CONTEXT = "### Task:\nRespond to the user query"
"""Open WebUI's, around a question with files or a search; the next turn has the question alone."""
_EXAMPLES_END = "I switched to a new code base."
"""What stands before it in aider's requests is a worked example."""


class Said(NamedTuple):
    """One message that counts."""

    role: str
    """user, tool or assistant."""
    key: bytes
    """Of this message alone."""
    end: bytes
    """Of the whole history up to here."""
    call_ids: tuple[str, ...]
    is_users: bool
    """Whether somebody wrote it: not a tool's result, nor what a client adds by itself."""
    is_telling: bool
    """Whether no two sessions are likely to hold it."""
    text: str


@dataclass(slots=True)
class History:
    start: bytes
    """Where histories of one scope begin."""
    said: list[Said] = field(default_factory=list[Said])
    system: bytes = b""

    @property
    def question(self) -> str:
        """The last text that somebody wrote."""
        return next((one.text for one in reversed(self.said) if one.is_users), "")

    @property
    def users_text(self) -> str:
        """All of it, for who asks what it quotes."""
        return "\n".join(one.text for one in self.said if one.is_users)

    @property
    def end(self) -> bytes:
        """b"" where nothing was said: no history continues it."""
        return self.said[-1].end if self.said else b""

    @property
    def has_answers(self) -> bool:
        return any(one.role == "assistant" for one in self.said)

    def turns_after(self, at: int) -> int:
        """How often somebody wrote after message `at` (-1: before all), counted once between two
        answers."""
        turns, is_open = 0, True
        for one in self.said[at + 1 :]:
            if one.role == "assistant":
                is_open = True
            elif one.is_users and is_open:
                turns, is_open = turns + 1, False
        return turns


def history_of(messages: Sequence[Any], scope: str) -> History:
    """Never raises, whatever an app sends."""
    history = History(start_of(scope))
    end, before, num_examples = history.start, "", 0
    for message in messages:
        if not isinstance(message, dict):
            continue
        body = cast(Json, message)
        if body.get("role") in ("system", "developer"):
            history.system = history.system or _key(text_of(body.get("content"))[:SYSTEM_CHARS])
            continue
        said = said_after(end, body, before)
        if said is None:
            continue
        if said.role == "user" and said.text.startswith(_EXAMPLES_END):
            num_examples = len(history.said)
        history.said.append(said)
        end, before = said.end, said.role
    history.said[:num_examples] = [
        one._replace(is_users=False) for one in history.said[:num_examples]
    ]
    return history


@lru_cache(1024)
def start_of(scope: str) -> bytes:
    return _key(scope)


def said_after(end: bytes, message: Json, before: str = "") -> Said | None:
    """None where it says nothing. `before`: who spoke last."""
    role = _ROLES.get(str(message.get("role")), "user")
    text = _text(message)
    calls = _calls(message) if role == "assistant" else ()
    parts = _pictures(message.get("content"))
    if not (text or calls or parts):
        return None
    told = f"{role}\0{len(text)}\0{text}".encode(errors="surrogatepass")
    own = blake2b(told, digest_size=KEY_BYTES)
    for name, arguments in calls:
        own.update(b"\0%d\0%b\0" % (len(arguments), name.encode(errors="surrogatepass")))
        own.update(arguments)
    for part in parts:
        own.update(b"\1%d\1" % len(part))
        own.update(part)
    key = own.digest()
    is_users = role == "user" and not text.startswith(_NOT_A_USERS)
    return Said(
        role,
        key,
        blake2b(end + key, digest_size=KEY_BYTES).digest(),
        tuple(_call_ids(message, role, text)) if role != "user" else (),
        # Clients hand over a tool's pictures in a message of the user's, for a tool has none.
        is_users and not (before == "tool" and not text),
        role == "assistant" and (bool(calls) or len(text) >= LONG_ANSWER),
        text,
    )


def _key(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()


def _text(message: Json) -> str:
    text = text_of(message.get("content"))
    if "<" in text:
        text = without(text, *_REMINDERS)
        if message.get("role") == "assistant":
            for begin, end in _THOUGHTS:
                text = without(text, begin, end)
        elif text.startswith(_WITH_CONTEXT):
            text = _asked(text)
    return text.strip()


def _asked(text: str) -> str:
    """
    >>> _asked("### Task: ... <context>a</context>\\n<user_query>\\nWhy?\\n</user_query>")
    'Why?'
    """
    asked = text.rpartition("</context>")[2].strip()
    return asked.removeprefix("<user_query>").removesuffix("</user_query>").strip() or text


def without(text: str, begin: str, end: str) -> str:
    """Without what stands between these marks. A regular expression would look through the rest of
    the text once for each mark that nothing closes.

    >>> without("a<b>c</b>d<b>e", "<b>", "</b>")
    'ad<b>e'
    """
    kept: list[str] = []
    at = 0
    while (start := text.find(begin, at)) >= 0 and (stop := text.find(end, start)) >= 0:
        kept.append(text[at:start])
        at = stop + len(end)
    return "".join([*kept, text[at:]]) if kept else text


def _pictures(content: object) -> list[bytes]:
    """Parts that are no text: pictures, sound, files."""
    found: list[bytes] = []
    for part in cast(list[Any], content) if isinstance(content, list) else ():
        if isinstance(part, dict) and not isinstance(cast(Json, part).get("text"), str):
            whole = cast(Json, part)
            kept = {name: whole[name] for name in whole if name != "cache_control"}
            if kept and kept.get("type") not in ("thinking", "reasoning"):
                found.append(_dumped(kept))
    return found


def _calls(message: Json) -> list[tuple[str, bytes]]:
    calls: object = message.get("tool_calls")
    told = cast(list[Any], calls) if isinstance(calls, list) else []
    functions = [cast(Json, call).get("function") for call in told if isinstance(call, dict)]
    functions.append(message.get("function_call"))
    return [
        (str(cast(Json, one).get("name") or ""), canonical(cast(Json, one).get("arguments")))
        for one in functions
        if isinstance(one, dict)
    ]


def _call_ids(message: Json, role: str, text: str) -> Iterator[str]:
    if role == "assistant":
        calls: object = message.get("tool_calls")
        for call in cast(list[Any], calls) if isinstance(calls, list) else []:
            if isinstance(call, dict) and isinstance(cast(Json, call).get("id"), str):
                yield cast(Json, call)["id"]
        if text.startswith(_CALLS_AS_TEXT):
            yield from _IDS_IN_TEXT.findall(text)
    elif role == "tool" and isinstance(message.get("tool_call_id"), str):
        yield message["tool_call_id"]


def canonical(arguments: object) -> bytes:
    """Arguments as a value: however they are spaced, ordered, escaped, and however whole numbers
    are written.

    >>> canonical('{"b": 1.0, "a": "\\\\u00e9"}') == canonical('{"a":"é","b":1}')
    True
    """
    if arguments in (None, "", "{}"):
        return b"{}"
    value: object = arguments
    if isinstance(arguments, str):
        try:
            value = orjson.loads(arguments)
            if _FLOATS.search(arguments):
                value = _with_whole_numbers(value)
        except (ValueError, RecursionError):
            return arguments.strip().encode(errors="surrogatepass")
    return _dumped(value)


def _with_whole_numbers(value: object) -> object:
    """JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE:
        return int(value)
    if isinstance(value, dict):
        items = cast(Json, value).items()
        return {name: _with_whole_numbers(one) for name, one in items}
    if isinstance(value, list):
        return [_with_whole_numbers(one) for one in cast(list[Any], value)]
    return value


def _dumped(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # nested deeper than orjson writes, or half a surrogate
        return repr(value).encode(errors="surrogatepass")


# A prompt without messages as a history: it continues an earlier one if it begins with that
# prompt and the answer to it.

NUM_ENDS = 256
"""Answers that a prompt is tried against: each costs a hash's end."""


class TextEnds:
    """How long the latest prompts were with their answers."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=NUM_ENDS)

    def history_of(self, prompt: str, scope: str) -> History:
        """One message for each earlier end, whether or not it is one of this prompt's, and a last
        one for the prompt."""
        history = History(start_of(scope))
        if not prompt:
            return history
        running, at = _begun(history.start), 0
        for length in sorted({one for one in self._lengths if one <= len(prompt)}):
            running.update(_bytes(prompt[at:length]))
            at = length
            key = running.digest()
            history.said.append(Said("end", key, key, (), False, False, ""))
        running.update(_bytes(prompt[at:]))
        key = running.digest()
        history.said.append(Said("user", key, key, (), True, False, prompt))
        return history

    def add(self, length: int) -> None:
        self._lengths.append(length)


class TextSoFar:
    """A prompt that waits for its answer: its hash, not its text."""

    def __init__(self, prompt: str, scope: str) -> None:
        self._running = _begun(start_of(scope))
        self._running.update(_bytes(prompt))
        self._length = len(prompt)

    def ended_by(self, answer: str) -> tuple[bytes, int] | None:
        """Key and length of both; None where there is no answer."""
        told = answer.rstrip()
        if not told:
            return None
        whole = self._running.copy()
        whole.update(_bytes(told))
        return whole.digest(), self._length + len(told)


def _begun(start: bytes) -> Any:
    return blake2b(b"text" + start, digest_size=KEY_BYTES)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
