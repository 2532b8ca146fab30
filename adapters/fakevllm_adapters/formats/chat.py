"""The adapter (format translator) of /v1/chat/completions. It builds the requests for siblings
(several answers to one request), parses answers, and relays bytes.

Fields of a request that this module does not know reach the engine unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import orjson

from fakevllm_adapters.formats.base import Answer, EngineInfo, Exchange, History, Json
from fakevllm_adapters.formats.sse import DONE, KEEP_ALIVE, encode, parse_event, parse_events
from fakevllm_adapters.protocol.errors import internal_error

NEUTRAL_SAMPLING: Json = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Parameters for sampling from the whole distribution of the model. With other values, the recorded
logprobs cannot be used for training."""

_NOT_FOR_SIBLINGS = ("logit_bias", "n")
_TEXTS = ("content", "reasoning", "reasoning_content")
MAX_TOOL_CALLS = 4096
"""Maximum number of tool calls in an answer. Without this limit, a large index in a streamed call
would allocate that many calls."""
_NO_SEED = -1
"""The seed that means "no seed" in vLLM."""
_LEAST, _MOST = -(2**63), 2**63 - 1
"""Range of the integers that vLLM accepts and that SQLite can store."""

PATH = "/v1/chat/completions"


_ENDING = re.compile(rb'"finish_reason":\s*"|"error":\s*[{"]')
"""Pattern for the end of an answer. It does not match text inside a JSON string, where quotes are
escaped."""
_OPEN_CHOICE = b'"finish_reason":null'
"""The bytes of the field `finish_reason` in a choice that is not complete, as engines write
them."""
_CHOICE = re.compile(rb'"choices":\s*\[\s*\{')
_OBJECT = re.compile(rb"data: ?\{.*\}\s+", re.DOTALL)


def _is_end(event: bytes) -> bool:
    """Return True if the event matches _ENDING, the pattern for the end of an answer.

    Nearly all events of a stream do not match. A cheap condition rejects these events first. This
    condition is several times as fast as the pattern.
    """
    if event.count(b'"finish_reason"') == 1 and _OPEN_CHOICE in event and b'"error"' not in event:
        return False
    return _ENDING.search(event) is not None


def stream_end(exchange: Exchange, events: Sequence[bytes]) -> bytes:
    """Return the bytes that end the app's stream. Call this function if the engine's stream ended
    without `[DONE]`.

    `events` are the events that arrived. If one of them has a finish_reason, the answer is
    complete, and the app's stream ends normally. Otherwise the app's stream ends with an error.
    """
    is_whole = any(map(_is_end, events))
    return exchange.event(DONE) if is_whole else exchange.end_with_error(internal_error().body)


def default_finish_reason(events: Sequence[bytes], has_choice: bool) -> str:
    """Return "stop", the finish_reason of a complete stream whose events have no finish_reason.

    Raises ValueError if the stream has no `[DONE]` or no choice, because such a stream is not
    complete.
    """
    if DONE not in events or not has_choice:
        raise ValueError("the stream ended without a finish_reason")
    return "stop"


class RelayExchange:
    """The exchange (translator of one request and its response) for a format that the engine itself
    uses. It relays the bytes of the engine's answer unchanged.

    There are two exceptions. An event that no client can parse is replaced by an error. If a stream
    ends without a finish_reason, a chunk with a finish_reason is added. Without these changes, the
    stream would not end properly, and a client would retry without end.
    """

    def __init__(self, body: Json) -> None:
        self.body = body
        self.streamed = is_true(body.get("stream"))
        self._is_over = False
        # The events themselves are not stored, because a stream may be long.
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
                return self.end_with_error(internal_error().body)
            self._has_choice = self._has_choice or _CHOICE.search(event) is not None
            self._has_end = self._has_end or _is_end(event)
            self._last = event
        return event

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def _closed(self) -> bytes:
        """Return the last bytes of the app's stream, which end with `[DONE]`.

        If the engine sent no finish_reason, a chunk with a finish_reason precedes `[DONE]`. If the
        engine sent no choice at all, the stream ends with an error.
        """
        self._is_over = True
        if self._has_end:
            return DONE
        try:
            last = parse_event(self._last) or {}
        except ValueError:
            last = {}
        if not (last and self._has_choice):
            return self.end_with_error(internal_error().body)
        empty: Json = {"text": ""} if last.get("object") == "text_completion" else {"delta": {}}
        choice = {"index": 0} | empty | {"logprobs": None, "finish_reason": "stop"}
        kept = {key: last[key] for key in ("id", "object", "created", "model") if key in last}
        return encode(kept | {"choices": [choice]}) + DONE

    def end_with_error(self, error: Json) -> bytes:
        self._is_over = True
        return encode(error) + DONE


def is_true(value: object) -> bool:
    """Return True if vLLM reads this value as true. For example, vLLM reads "yes" as true."""
    if isinstance(value, str):
        return value.lower() in ("true", "t", "1", "yes", "y", "on")
    return value is True or value == 1


class ChatAdapter:
    """The adapter (format translator) of chat completions, and the base class of other adapters."""

    name = "chat"
    path = PATH
    upstream_path = PATH
    has_previous_response = False

    def open(self, body: Json, engine: EngineInfo, earlier: History | None = None) -> Exchange:
        return RelayExchange(body)

    def refusal(self, status: int, body: Json) -> Json:
        return body

    def question(self, body: Json) -> str:
        return next(_user_texts(reversed(_messages(body))), "")

    def opening(self, body: Json) -> str:
        return next(_user_texts(_messages(body)), "")

    def seed(self, body: Json) -> int | None:
        seed = _seed_in(body)
        return None if seed == _NO_SEED else seed

    def sibling_body(self, body: Json, index: int, temperature: float) -> Json:
        if index == 0:
            return body
        changed = {key: value for key, value in body.items() if key not in _NOT_FOR_SIBLINGS}
        changed |= NEUTRAL_SAMPLING | {"temperature": temperature}
        seed = _seed_in(body)
        if seed is not None:
            changed["seed"] = _counted_up(seed, index)
        if body.get("request_id"):  # engines accept an id for a single request only
            changed["request_id"] = f"{body['request_id']}-{index}"
        return changed

    def parse_answer(self, body: Json) -> Answer:
        choices = body.get("choices")
        if not isinstance(choices, list) or not choices:
            raise ValueError("the answer has no choices")
        choice = cast(Json, choices[0])
        fields = choice["message"].items()
        message = {key: value for key, value in fields if value is not None or key == "content"}
        return build_answer(message, choice.get("finish_reason"), body.get("usage"), body)

    def parse_stream(self, events: Sequence[bytes]) -> Answer:
        message: Json = {"role": "assistant", "content": None}
        finish_reason: str | None = None
        usage: Json = {}
        has_choice = False
        first: Json = {}
        for chunk in parse_events(events):
            if "error" in chunk:
                raise ValueError(f"the stream ended in an error: {chunk['error']}")
            first = first if first.get("id") else chunk
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", []):
                if choice.get("index", 0) == 0:
                    has_choice = True
                    _extend(message, choice.get("delta") or {})
                    finish_reason = choice.get("finish_reason") or finish_reason
        finish_reason = finish_reason or default_finish_reason(events, has_choice)
        return build_answer(message, finish_reason, usage, first)


def build_answer(message: Json, finish_reason: object, usage: object, names: Json) -> Answer:
    """Build an Answer from fields of the engine's response. `names` is the response, or the chunk
    of a stream, that has the answer's id and the name of the model.

    Raises ValueError or TypeError for values that the ledger (the proxy's database of requests)
    cannot store. No engine sends such values.
    """
    if not (finish_reason is None or isinstance(finish_reason, str)):
        raise ValueError("a finish_reason is a word")
    counts = cast(Json, usage) if isinstance(usage, dict) else {}
    if not (_is_count(counts.get("prompt_tokens")) and _is_count(counts.get("completion_tokens"))):
        raise ValueError("usage does not count tokens")
    orjson.dumps(message)
    return Answer(message, finish_reason, counts, _text_in(names, "id"), _text_in(names, "model"))


def _text_in(fields: Json, name: str) -> str | None:
    value = fields.get(name)
    return value if isinstance(value, str) else None


def _is_count(number: object) -> bool:
    return number is None or (isinstance(number, int) and _LEAST <= number <= _MOST)


def _seed_in(body: Json) -> int | None:
    """Return the seed of a request, read from the field `seed` in the way that vLLM reads it.

    Like vLLM, accept 5.0 and "5" as the seed 5. Return None if vLLM would refuse the value.
    """
    value: object = body.get("seed")
    if isinstance(value, float) and not value.is_integer():
        return None
    try:
        seed = int(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None
    return seed if seed is not None and _LEAST <= seed <= _MOST else None


def _counted_up(seed: int, index: int) -> int:
    """Return `seed + index`, the seed of the sibling (sampled answer) with the number `index`.

    A sum above the highest signed 64-bit integer wraps around to the lowest. The seed -1 means that
    the request has no seed. In this case, return -1. Siblings without a seed differ anyway.

    >>> _counted_up(2**63 - 1, 1) == -(2**63), _counted_up(-1, 3)
    (True, -1)
    """
    return seed if seed == _NO_SEED else (seed + index + 2**63) % 2**64 - 2**63


def _extend(message: Json, delta: Json) -> None:
    """Append the text and the tool calls of a stream's delta to `message`."""
    for key, piece in delta.items():
        if key in _TEXTS and isinstance(piece, str):
            message[key] = (message.get(key) or "") + piece
    pieces: list[Json] = delta.get("tool_calls") or []
    for call in pieces:
        _extend_tool_call(cast(list[Json], message.setdefault("tool_calls", [])), call)


def _extend_tool_call(calls: list[Json], piece: Json) -> None:
    index: int = piece.get("index", len(calls))
    if not 0 <= index < MAX_TOOL_CALLS:
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
    """Return the text of a message's content. If the content is a list of parts, the texts of the
    parts are joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [cast(Json, part) for part in cast(list[Any], content) if isinstance(part, dict)]
        return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
    return ""
