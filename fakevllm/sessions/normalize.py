"""Normalized message histories. Each history has a key, which is a hash. The key is the same for
all forms in which clients repeat a conversation. Clients parse the messages that they receive and
serialize them again, so the bytes of the messages change.

A key depends on the role, the text, the tool calls with their parsed arguments, and the pictures as
they are sent. A key does not depend on parts that change between requests. These parts are ids,
system prompts (they contain the date), reasoning, `cache_control`, reminders that coding agents
insert, and empty messages.

A completions request has a prompt and no messages. The prompt is treated as a history too. A new
prompt continues an earlier prompt if the new prompt begins with the earlier prompt, followed by the
answer to the earlier prompt.
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
"""Number of characters at the beginning of a system prompt from which its key is computed. These
characters are enough to distinguish apps. They mostly do not contain the date, because the date
comes later in the prompt."""
LONG_ANSWER = 40
"""Minimum number of characters of a distinctive answer without tool calls. A distinctive answer is
unlikely to occur in two sessions. An answer with tool calls is always distinctive."""
NUM_ENDS = 256
"""Maximum number of earlier prompts of completions requests with which a new prompt is compared.
Each comparison computes one hash."""

_REMINDERS = ("<system-reminder>", "</system-reminder>")
_THOUGHTS = (("<think>", "</think>"), ('<details type="reasoning"', "</details>"))
_FLOATS = re.compile(r"\d(?:\.0|[eE])")
_MAX_EXACT_INTEGER = 2.0**53
_CALLS_AS_TEXT = "Calling tools:"
_IDS_IN_TEXT = re.compile(r"'id': '([^']+)'")
_ROLES = {"assistant": "assistant", "tool": "tool", "function": "tool"}
"""Normalized role for each role of a message. All other roles are normalized to "user"."""
_NOT_FROM_USER = (
    "Observation:",  # smolagents: a tool's result
    "I have *added these files to the chat*",  # aider, from here on
    "I am not sharing any files that you can edit yet",
    "Here are summaries of some files present in my git repository",
    "Here are some READ ONLY files",
    "I switched to a new code base.",
    "Continue if you have next steps",  # opencode, after it shortened a history by itself
)
_WITH_CONTEXT = "### Task:\nRespond to the user query"
"""Beginning of the text that Open WebUI puts around a question if it adds files or a web search. In
the next request, Open WebUI sends only the question."""
_EXAMPLES_END = "I switched to a new code base."
"""Beginning of a certain message in requests of aider. The messages before it are an example
conversation that aider sends with each request."""


class NormalizedMessage(NamedTuple):
    """A message of a history, reduced to the parts that its key depends on. The key is a hash."""

    role: str
    """user, tool or assistant."""
    key: bytes
    """Key of this message alone."""
    history_key: bytes
    """Key of the history up to and including this message."""
    call_ids: tuple[str, ...]
    """Ids of the tool calls in an assistant's message, or the id of the call whose result a tool's
    message contains."""
    is_from_user: bool
    """Whether a user wrote the message. False for tool results and for texts that the app added by
    itself."""
    is_distinctive: bool
    """Whether the message is unlikely to occur in two sessions."""
    text: str


@dataclass(slots=True)
class MessageHistory:
    """The message history of a request, with normalized messages."""

    start: bytes
    """Key of the empty history of the scope (API key)."""
    messages: list[NormalizedMessage] = field(default_factory=list[NormalizedMessage])
    system_key: bytes = b""
    """Key of the beginning of the system prompt; b"" without a system prompt."""

    @property
    def question(self) -> str:
        """The last text of the history that a user wrote, or "" if there is none."""
        texts = (message.text for message in reversed(self.messages) if message.is_from_user)
        return next(texts, "")

    @property
    def user_text(self) -> str:
        """All texts of the history that users wrote, joined into one text. The proxy searches this
        text for quotes of earlier questions."""
        return "\n".join(message.text for message in self.messages if message.is_from_user)

    @property
    def key(self) -> bytes:
        """Key (hash) of the whole history. If the history has no messages, the key is b"", because
        no later request can continue an empty history."""
        return self.messages[-1].history_key if self.messages else b""

    @property
    def has_answers(self) -> bool:
        """True if the history has a message of the assistant."""
        return any(message.role == "assistant" for message in self.messages)

    def turns_after(self, at: int) -> int:
        """Return the number of turns that begin after the message with the index `at`. If `at` is
        -1, all turns are counted.

        A turn begins with a user's message. Several messages of a user between two answers count as
        one turn.
        """
        turns, is_open = 0, True
        for message in self.messages[at + 1 :]:
            if message.role == "assistant":
                is_open = True
            elif message.is_from_user and is_open:
                turns, is_open = turns + 1, False
        return turns


def normalize_history(messages: Sequence[Any], scope: str) -> MessageHistory:
    """Return the normalized history for the messages of a chat request. Invalid messages are
    ignored."""
    history = MessageHistory(scope_key(scope))
    history_key, previous_role, num_examples = history.start, "", 0
    for raw_message in messages:
        if not isinstance(raw_message, dict):
            continue
        message = cast(Json, raw_message)
        if message.get("role") in ("system", "developer"):
            beginning = text_of(message.get("content"))[:SYSTEM_CHARS]
            history.system_key = history.system_key or _key(beginning)
            continue
        normalized = normalize_message(history_key, message, previous_role)
        if normalized is None:
            continue
        if normalized.role == "user" and normalized.text.startswith(_EXAMPLES_END):
            num_examples = len(history.messages)
        history.messages.append(normalized)
        history_key, previous_role = normalized.history_key, normalized.role
    history.messages[:num_examples] = [
        example._replace(is_from_user=False) for example in history.messages[:num_examples]
    ]
    return history


@lru_cache(1024)
def scope_key(scope: str) -> bytes:
    """Return the key (hash) of the empty history for a scope (an API key). The keys of all
    histories are computed from this key, so histories of two scopes never match."""
    return _key(scope)


def normalize_message(
    history_key: bytes, message: Json, previous_role: str = ""
) -> NormalizedMessage | None:
    """Return the normalized form of a message, or None if the message is empty.

    `history_key` is the key of the history before this message. The result contains the key of the
    history including this message.
    """
    role = _ROLES.get(str(message.get("role")), "user")
    text = _text(message)
    calls = _calls(message) if role == "assistant" else ()
    parts = _non_text_parts(message.get("content"))
    if not (text or calls or parts):
        return None
    words = f"{role}\0{len(text)}\0{text}".encode(errors="surrogatepass")
    digest = blake2b(words, digest_size=KEY_BYTES)
    for name, arguments in calls:
        digest.update(b"\0%d\0%b\0" % (len(arguments), name.encode(errors="surrogatepass")))
        digest.update(arguments)
    for part in parts:
        digest.update(b"\1%d\1" % len(part))
        digest.update(part)
    key = digest.digest()
    is_user_text = role == "user" and not text.startswith(_NOT_FROM_USER)
    return NormalizedMessage(
        role=role,
        key=key,
        history_key=blake2b(history_key + key, digest_size=KEY_BYTES).digest(),
        call_ids=tuple(_call_ids(message, role, text)) if role != "user" else (),
        # A tool's result cannot have pictures: clients send them in a message with the user's role.
        is_from_user=is_user_text and not (previous_role == "tool" and not text),
        is_distinctive=role == "assistant" and (bool(calls) or len(text) >= LONG_ANSWER),
        text=text,
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
            text = _question_in_context(text)
    return text.strip()


def _question_in_context(text: str) -> str:
    """Return only the user's question from a text to which an app has added context. If the text
    contains no context, return the whole text.

    >>> _question_in_context("### Task: ... <context>a</context>\\n<user_query>Why?</user_query>")
    'Why?'
    """
    question = text.rpartition("</context>")[2].strip()
    return question.removeprefix("<user_query>").removesuffix("</user_query>").strip() or text


def without(text: str, begin: str, end: str) -> str:
    """Return the text without the passages that begin with the marker `begin` and end with the
    marker `end`.

    No regular expression is used. A regular expression would scan the rest of the text again for
    each `begin` without an `end`.

    >>> without("a<b>c</b>d<b>e", "<b>", "</b>")
    'ad<b>e'
    """
    passages: list[str] = []
    at = 0
    while (start := text.find(begin, at)) >= 0 and (stop := text.find(end, start)) >= 0:
        passages.append(text[at:start])
        at = stop + len(end)
    return "".join([*passages, text[at:]]) if passages else text


def _non_text_parts(content: object) -> list[bytes]:
    """Return the parts of a message's content that are not text, such as pictures, sound and files,
    as JSON. Reasoning is left out."""
    parts: list[bytes] = []
    for part in cast(list[Any], content) if isinstance(content, list) else ():
        if isinstance(part, dict) and not isinstance(cast(Json, part).get("text"), str):
            fields = {k: v for k, v in cast(Json, part).items() if k != "cache_control"}
            if fields and fields.get("type") not in ("thinking", "reasoning"):
                parts.append(_dumped(fields))
    return parts


def _calls(message: Json) -> list[tuple[str, bytes]]:
    """Return one pair for each tool call of a message: the tool's name, and the arguments in
    canonical form."""
    tool_calls: object = message.get("tool_calls")
    calls = cast(list[Any], tool_calls) if isinstance(tool_calls, list) else []
    functions = [cast(Json, call).get("function") for call in calls if isinstance(call, dict)]
    functions.append(message.get("function_call"))
    return [
        (
            str(cast(Json, function).get("name") or ""),
            canonical_arguments(cast(Json, function).get("arguments")),
        )
        for function in functions
        if isinstance(function, dict)
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


def canonical_arguments(arguments: object) -> bytes:
    """Return the arguments of a tool call as JSON in a canonical form. The form is the same for
    arguments that differ only in spaces, the order of keys, escapes, or the spelling of whole
    numbers (1.0 or 1). Arguments that are not JSON are only stripped of surrounding spaces.

    >>> canonical_arguments('{"b": 1.0, "a": "\\\\u00e9"}').decode()
    '{"a":"é","b":1}'
    """
    if arguments in (None, "", "{}"):
        return b"{}"
    value: object = arguments
    if isinstance(arguments, str):
        try:
            value = orjson.loads(arguments)
            if _FLOATS.search(arguments):
                value = _with_integers(value)
        except (ValueError, RecursionError):
            return arguments.strip().encode(errors="surrogatepass")
    return _dumped(value)


def _with_integers(value: object) -> object:
    """Return a JSON value in which each float without a fractional part, such as 1.0, is replaced
    by an integer. Clients in JavaScript write 1.0 as 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT_INTEGER:
        return int(value)
    if isinstance(value, dict):
        items = cast(Json, value).items()
        return {name: _with_integers(item) for name, item in items}
    if isinstance(value, list):
        return [_with_integers(item) for item in cast(list[Any], value)]
    return value


def _dumped(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # nested deeper than orjson allows, or a lone surrogate
        return repr(value).encode(errors="surrogatepass")


class PromptEnds:
    """The lengths of the latest prompts of completions requests. Each length is the total length of
    a prompt and its answer.

    A completions request has a prompt and no messages. To find the earlier prompt that a new prompt
    continues, the new prompt is cut off at each of these lengths. The hash of each part is then
    looked up among the hashes of the earlier prompts with their answers.
    """

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=NUM_ENDS)

    def history_of(self, prompt: str, scope: str) -> MessageHistory:
        """Return the prompt of a completions request as a message history.

        The history has one message for each stored length up to the prompt's length. The message
        represents the first part of the prompt with this length, and its key is the hash of this
        part. A later lookup of the key shows whether the part is an earlier prompt with its answer.
        The last message of the history represents the whole prompt.
        """
        history = MessageHistory(scope_key(scope))
        if not prompt:
            return history
        digest, at = _new_digest(history.start), 0
        for length in sorted({one for one in self._lengths if one <= len(prompt)}):
            digest.update(_bytes(prompt[at:length]))
            at = length
            key = digest.digest()
            history.messages.append(_prompt_message("end", key, ""))
        digest.update(_bytes(prompt[at:]))
        history.messages.append(_prompt_message("user", digest.digest(), prompt))
        return history

    def add(self, length: int) -> None:
        """Store the total length of a prompt and its answer, in characters. The method `history_of`
        looks for this prompt at the beginning of later prompts."""
        self._lengths.append(length)


class PromptHash:
    """The hash of a prompt that has no answer yet. When the answer is known, `with_answer` returns
    the hash of the prompt followed by the answer. The texts themselves are not stored."""

    def __init__(self, prompt: str, scope: str) -> None:
        self._digest = _new_digest(scope_key(scope))
        self._digest.update(_bytes(prompt))
        self._length = len(prompt)

    def with_answer(self, answer: str) -> tuple[bytes, int] | None:
        """Return (hash, length in characters) of the prompt followed by its answer. Return None if
        the answer is empty."""
        text = answer.rstrip()
        if not text:
            return None
        digest = self._digest.copy()
        digest.update(_bytes(text))
        return digest.digest(), self._length + len(text)


def _prompt_message(role: str, key: bytes, text: str) -> NormalizedMessage:
    return NormalizedMessage(
        role=role,
        key=key,
        history_key=key,
        call_ids=(),
        is_from_user=role == "user",
        is_distinctive=False,
        text=text,
    )


def _new_digest(start: bytes) -> Any:
    return blake2b(b"text" + start, digest_size=KEY_BYTES)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
