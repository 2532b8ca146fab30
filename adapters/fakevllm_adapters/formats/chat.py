"""/v1/chat/completions from the reader's side: what the app asked, what the engine answered.

The request body is never rebuilt: fields unknown to us pass through.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import orjson

from fakevllm_adapters.formats.base import Answer, Earlier, Engine, Exchange, Json
from fakevllm_adapters.formats.sse import DONE, KEEP_ALIVE, encode, json_of, jsons_of
from fakevllm_adapters.protocol.errors import internal_error

NEUTRAL_SAMPLING: Json = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling from the whole distribution: anything else makes the recorded logprobs unusable for
training."""

_NOT_FOR_SIBLINGS = ("logit_bias", "n")
_TEXTS = ("content", "reasoning", "reasoning_content")
MAX_CALLS = 4096
"""Tool calls of one answer that are read; the index of a streamed one is a number like any."""
_LEAST, _MOST = -(2**63), 2**63 - 1
"""Of the numbers that vLLM takes and a ledger keeps."""


PATH = "/v1/chat/completions"


_ENDING = re.compile(rb'"finish_reason":\s*"|"error":\s*[{"]')
"""In a string these quotes would be escaped."""
_CHOICE = re.compile(rb'"choices":\s*\[\s*\{')
_OBJECT = re.compile(rb"data: ?\{.*\}\s+", re.DOTALL)


def end_of(exchange: Exchange, events: Sequence[bytes]) -> bytes:
    """What closes a stream of the upstream that broke off behind these events, without `[DONE]`:
    an answer whose end was told is whole."""
    is_whole = any(_ENDING.search(event) for event in events)
    return exchange.event(DONE) if is_whole else exchange.broken(internal_error().body)


def end_of_done(events: Sequence[bytes], has_choice: bool) -> str:
    """The reason of a stream that told none. Raises ValueError where it broke off, or was no
    answer."""
    if DONE not in events or not has_choice:
        raise ValueError("the stream ended without a finish_reason")
    return "stop"


class SameFormat:
    """The exchange of a format the upstream speaks itself: bytes are passed on. Only what no client
    can read becomes an error, and an end that gives no reason: clients ask again without end where
    neither comes."""

    def __init__(self, body: Json) -> None:
        self.body = body
        self.streamed = _is_true(body.get("stream"))
        self._is_over = False
        # Not the events themselves: a stream may be long.
        self._has_choice = False
        self._has_end = False
        self._last = b""

    def answer(self, raw: bytes) -> bytes:
        body: Any = orjson.loads(raw)
        if not (isinstance(body, dict) and cast(Json, body).get("choices")):
            raise ValueError("the answer has no choices")
        return raw

    def can_show(self, answer: Answer) -> bool:
        return True

    def event(self, event: bytes) -> bytes:
        if self._is_over:
            return b""
        if event == DONE:
            return self._closed()
        if not event.startswith(b":"):
            is_plain = event.startswith(b"data: {") and event.endswith(b"}\n\n")
            if not is_plain and not _OBJECT.fullmatch(event):
                return self.broken(internal_error().body)
            self._has_choice = self._has_choice or _CHOICE.search(event) is not None
            self._has_end = self._has_end or _ENDING.search(event) is not None
            self._last = event
        return event

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def _closed(self) -> bytes:
        """The end; with a reason where the engine said that all has come, and gave none."""
        self._is_over = True
        if self._has_end:
            return DONE
        try:
            last = json_of(self._last) or {}
        except ValueError:
            last = {}
        if not (last and self._has_choice):
            return self.broken(internal_error().body)
        empty: Json = {"text": ""} if last.get("object") == "text_completion" else {"delta": {}}
        choice = {"index": 0} | empty | {"logprobs": None, "finish_reason": "stop"}
        kept = {key: last[key] for key in ("id", "object", "created", "model") if key in last}
        return encode(kept | {"choices": [choice]}) + DONE

    def broken(self, error: Json) -> bytes:
        self._is_over = True
        return encode(error) + DONE


def _is_true(value: object) -> bool:
    """As vLLM reads a flag: "false" is false."""
    if isinstance(value, str):
        return value.lower() in ("true", "t", "1", "yes", "y", "on")
    return value is True or value == 1


class ChatAdapter:
    name = "chat"
    path = PATH
    upstream_path = PATH
    names_answers = False

    def open(self, body: Json, engine: Engine, earlier: Earlier | None = None) -> Exchange:
        return SameFormat(body)

    def refusal(self, status: int, body: Json) -> Json:
        return body

    def question(self, body: Json) -> str:
        return next(_user_texts(reversed(_messages(body))), "")

    def opening(self, body: Json) -> str:
        return next(_user_texts(_messages(body)), "")

    def sibling(self, body: Json, index: int, temperature: float) -> Json:
        if index == 0:
            return body
        changed = {key: value for key, value in body.items() if key not in _NOT_FOR_SIBLINGS}
        changed |= NEUTRAL_SAMPLING | {"temperature": temperature}
        seed = _seed_in(body)
        if seed is not None:
            changed["seed"] = _counted_up(seed, index)
        if body.get("request_id"):  # engines take an id for one request
            changed["request_id"] = f"{body['request_id']}-{index}"
        return changed

    def read_json(self, body: Json) -> Answer:
        choices = body.get("choices")
        if not isinstance(choices, list) or not choices:
            raise ValueError("the answer has no choices")
        choice = cast(Json, choices[0])
        said = choice["message"].items()
        message = {key: value for key, value in said if value is not None or key == "content"}
        return answer_of(message, choice.get("finish_reason"), body.get("usage"), body.get("id"))

    def read_events(self, events: Sequence[bytes]) -> Answer:
        message: Json = {"role": "assistant", "content": None}
        finish_reason: str | None = None
        usage: Json = {}
        has_choice = False
        name: object = None
        for chunk in jsons_of(events):
            if "error" in chunk:
                raise ValueError(f"the stream ended in an error: {chunk['error']}")
            name = name or chunk.get("id")
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", []):
                if choice.get("index", 0) == 0:
                    has_choice = True
                    _extend(message, choice.get("delta") or {})
                    finish_reason = choice.get("finish_reason") or finish_reason
        finish_reason = finish_reason or end_of_done(events, has_choice)
        return answer_of(message, finish_reason, usage, name)


def answer_of(message: Json, finish_reason: object, usage: object, name: object) -> Answer:
    """`name`: its id. Raises ValueError, TypeError for what no engine says: it cannot be kept."""
    if not (finish_reason is None or isinstance(finish_reason, str)):
        raise ValueError("a finish_reason is a word")
    counts = cast(Json, usage) if isinstance(usage, dict) else {}
    if any(not _is_count(counts.get(name)) for name in ("prompt_tokens", "completion_tokens")):
        raise ValueError("usage does not count tokens")
    orjson.dumps(message)
    return Answer(message, finish_reason, counts, name if isinstance(name, str) else None)


def _is_count(number: object) -> bool:
    return number is None or (isinstance(number, int) and _LEAST <= number <= _MOST)


def _seed_in(body: Json) -> int | None:
    """As vLLM reads it, which takes 5.0 and "5" too; None for what it refuses."""
    given: object = body.get("seed")
    if isinstance(given, float) and not given.is_integer():
        return None
    try:
        seed = int(given) if isinstance(given, int | float | str) else None
    except ValueError:
        return None
    return seed if seed is not None and _LEAST <= seed <= _MOST else None


def _counted_up(seed: int, index: int) -> int:
    """From the highest seed on with the lowest. vLLM takes -1 for no seed at all, which already
    differs from sibling to sibling.

    >>> _counted_up(2**63 - 1, 1) == -(2**63), _counted_up(-1, 3)
    (True, -1)
    """
    return seed if seed == -1 else (seed + index + 2**63) % 2**64 - 2**63


def _extend(message: Json, delta: Json) -> None:
    """Add one streamed delta to the message it belongs to."""
    for key, piece in delta.items():
        if key in _TEXTS and isinstance(piece, str):
            message[key] = (message.get(key) or "") + piece
    pieces: list[Json] = delta.get("tool_calls") or []
    for call in pieces:
        _extend_tool_call(cast(list[Json], message.setdefault("tool_calls", [])), call)


def _extend_tool_call(calls: list[Json], piece: Json) -> None:
    index: int = piece.get("index", len(calls))
    if not 0 <= index < MAX_CALLS:
        raise ValueError(f"no tool call has the index {index}")
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call: Json = calls[index]
    call["id"] = piece.get("id") or call["id"]
    function: Json = piece.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def _messages(body: Json) -> list[Any]:
    messages = body.get("messages")
    return cast(list[Any], messages) if isinstance(messages, list) else []


def _user_texts(messages: Iterable[Any]) -> Iterator[str]:
    for message in messages:
        if isinstance(message, dict) and cast(Json, message).get("role") == "user":
            yield text_of(cast(Json, message).get("content"))


def text_of(content: object) -> str:
    """The text of a message's content: a string, or the text parts of a list joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [cast(Json, part) for part in cast(list[Any], content) if isinstance(part, dict)]
        return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
    return ""
