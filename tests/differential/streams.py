"""Normalize a stream to its texts and its grammar, so that two streams can be compared.

vLLM joins tokens that its reader has not taken yet. Therefore it is random how many tokens an event
holds, and whether the last token comes with text or alone. The texts of each channel are joined. A
channel is a choice, an output item or a content block. Equal shapes in a row count once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from tests.differential.masking import Json, Mask

TEXT, EMPTY, COUNT, LIST = "<text>", "", "<count>", "<list>"
PING = "ping"
NUMBERS = "sequence numbers"
_TEXT_KEYS = frozenset({"content", "reasoning", "reasoning_content", "text", "arguments"})
"""Keys whose strings are pieces of a longer text."""
_TOKEN_KEYS = frozenset({"token_ids", "logprobs"})
_ANTHROPIC = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
}


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event."""

    fields: tuple[str, ...]
    """Names of the event's lines, such as ("event", "data")."""
    name: str
    data: str

    @property
    def json(self) -> Json | None:
        """Data as a JSON object, None if it is not one."""
        try:
            value: Any = json.loads(self.data)
        except ValueError:
            return None
        return cast(Json, value) if isinstance(value, dict) else None


@dataclass
class NormalizedStream:
    """A stream in a form in which equal streams are equal objects."""

    texts: dict[str, Any] = field(default_factory=dict[str, Any])
    """Joined texts and lists, by channel and key."""
    grammar: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """Shapes of the events in their order, by channel."""
    order: list[str] = field(default_factory=list[str])
    """Kind of channel of the first and of the last event. Which choice comes first is random."""


def parse_events(raw: bytes) -> list[Event]:
    """Return the events without comments and pings, which may come at any time."""
    *blocks, rest = raw.decode().split("\n\n")
    events = [_event(block) for block in blocks]
    if rest:
        events.append(Event(("rest",), "", rest))
    return [event for event in events if event.fields and event.name != PING]


def _event(block: str) -> Event:
    lines = [line.partition(": ") for line in block.split("\n") if not line.startswith(":")]
    values = {name: value for name, _, value in lines}
    return Event(
        tuple(name for name, _, _ in lines), values.get("event", ""), values.get("data", "")
    )


def normalize(events: list[Event], mask: Mask) -> NormalizedStream:
    """Return the stream in its normal form."""
    result = NormalizedStream()
    channels: list[str] = []
    for event in events:
        for channel, shape in _shapes(event, result.texts, mask):
            result.grammar.setdefault(channel, []).append(
                {"lines": " ".join(event.fields), "event": event.name, "data": shape}
            )
            channels.append(channel)
    if isinstance(result.texts.get(NUMBERS), int):
        result.texts[NUMBERS] = "all"
    result.order = [name.partition(" ")[0] for name in (channels[:1] + channels[-1:])]
    result.texts = dict(sorted(result.texts.items()))
    for channel, shapes in result.grammar.items():
        # Shapes are compared as text, because the order of keys counts.
        result.grammar[channel] = [
            json.loads(text) for text, _ in itertools.groupby(map(json.dumps, shapes))
        ]
    return result


def _shapes(event: Event, texts: Json, mask: Mask) -> Iterator[tuple[str, Any]]:
    chunk = event.json
    if chunk is None or "error" in chunk:
        yield "stream", mask(event.json) if chunk else event.data
    elif isinstance(chunk.get("choices"), list):
        yield from _choice_shapes(chunk, texts, mask)
    elif event.name.startswith("response."):
        yield "stream", _responses_shape(chunk, texts, mask)
    else:
        yield "stream", _messages_shape(chunk, texts, mask)


def _choice_shapes(chunk: Json, texts: Json, mask: Mask) -> Iterator[tuple[str, Any]]:
    choices: list[Json] = chunk["choices"]
    if not choices:
        yield "stream", mask(chunk)
        return
    assert len(choices) == 1, "A chunk has one choice."
    channel = f"choice {choices[0].get('index')}"
    for part in _split_chunk(chunk):
        (choice,) = part["choices"]
        shown = part | {"choices": [_extract_texts(choice, channel, texts)]}
        if _only_tokens(choice):
            continue
        if isinstance(chunk.get("usage"), dict):
            shown["usage"] = {key: COUNT for key in chunk["usage"]}
        yield channel, mask(shown)


def _split_chunk(chunk: Json) -> Iterator[Json]:
    """Split a chunk that has reasoning, text and the end of the answer into one chunk for each."""
    (choice,) = chunk["choices"]
    has_end = bool(choice.get("finish_reason"))
    nothing: Json = {"delta": {}} if "delta" in choice else {"text": EMPTY}
    pieces = _split_choice(choice)
    parts = [*pieces, nothing] if has_end and pieces else pieces or [{}]
    for index, part in enumerate(parts):
        shown = choice | part
        if index > 0:  # all tokens are shown in the first part
            shown |= {key: _empty_lists(shown[key]) for key in _TOKEN_KEYS & shown.keys()}
        if not has_end or part is parts[-1]:
            yield chunk | {"choices": [shown]}
        else:
            yield _without_end(chunk) | {"choices": [_without_end(shown)]}


def _split_choice(choice: Json) -> list[Json]:
    """Return the reasoning, the text and each tool call of a choice, as fields of a choice."""
    if choice.get("text"):
        return [{"text": choice["text"]}]
    delta: Json = choice.get("delta") or {}
    calls: list[Json] = delta.get("tool_calls") or []
    rest = {key: value for key, value in delta.items() if key not in ("reasoning", "tool_calls")}
    fields: list[Json] = [{"reasoning": delta["reasoning"]}] if delta.get("reasoning") else []
    fields += [rest] if any(rest.values()) else []
    fields += [{"tool_calls": [call]} for call in calls]
    if len(fields) == 1:
        return [{"delta": delta}]
    nulls = {key for key, value in delta.items() if value is None}
    return [
        {"delta": {key: part.get(key) for key in delta if key in part or key in nulls}}
        for part in fields
    ]


def _without_end(part: Json) -> Json:
    """Return a chunk or a choice without the fields that only the last one of an answer has."""
    kept = {key: value for key, value in part.items() if key != "system_fingerprint"}
    if "finish_reason" in kept:
        kept["finish_reason"] = None
        if "delta" in kept:
            del kept["stop_reason"]
        else:
            kept["stop_reason"] = None
    return kept


def _only_tokens(choice: Json) -> bool:
    """Return whether a choice has only token ids or logprobs.

    If the app requests ids, vLLM sends such a chunk for tokens that a parser removes from the text,
    unless it joins them to the next chunk.
    """
    is_empty = choice.get("delta") == {} and not choice.get("finish_reason")
    return is_empty and any(choice.get(key) for key in _TOKEN_KEYS)


def _empty_lists(value: Any) -> Any:
    """Return the value with all lists emptied."""
    if isinstance(value, dict):
        return {key: _empty_lists(inner) for key, inner in cast(Json, value).items()}
    return [] if isinstance(value, list) else value


def _extract_texts(value: Any, path: str, texts: Json) -> Any:
    """Return `value` with a placeholder for each text, and append the texts to `texts`."""
    if not isinstance(value, dict):
        return value
    shown: Json = {}
    for key, inner in cast(Json, value).items():
        where = f"{path} {key}"
        if key in _TEXT_KEYS and isinstance(inner, str) and inner:
            texts[where] = texts.get(where, "") + inner
            shown[key] = TEXT
        elif key in _TOKEN_KEYS and inner is not None:
            shown[key] = _extract_lists(inner, where, texts)
        elif key == "prompt_token_ids":  # in the first chunk of completions, with or without text
            texts.setdefault(where, []).extend(inner or [])
            shown[key] = LIST
        elif key == "tool_calls" and isinstance(inner, list):
            calls = cast(list[Json], inner)
            shown[key] = [
                _extract_texts(call, f"{where} {call.get('index')}", texts) for call in calls
            ]
        else:
            shown[key] = _extract_texts(inner, where, texts)
    return shown


def _extract_lists(value: Any, where: str, texts: Json) -> Any:
    """Return `value` with a placeholder for each list, and extend the lists in `texts`."""
    if isinstance(value, dict):
        return {
            key: _extract_lists(inner, f"{where} {key}", texts)
            if isinstance(inner, list)
            else inner
            for key, inner in cast(Json, value).items()
        }
    texts.setdefault(where, []).extend(cast(list[Any], value))
    return LIST


def _responses_shape(chunk: Json, texts: Json, mask: Mask) -> Any:
    shown = chunk | {"sequence_number": COUNT}
    # The number of events varies, so only gaps in the numbering are recorded.
    number = texts.setdefault(NUMBERS, 0)
    texts[NUMBERS] = number + 1 if chunk.get("sequence_number") == number else "with gaps"
    if str(chunk.get("type")).endswith(".delta"):
        where = f"{chunk['type']} {chunk.get('output_index')} {chunk.get('content_index')}"
        texts[where] = texts.get(where, "") + chunk["delta"]
        shown["delta"] = TEXT
        if chunk.get("logprobs"):
            shown["logprobs"] = _extract_lists(chunk["logprobs"], f"{where} logprobs", texts)
    return mask(shown)


def _messages_shape(chunk: Json, texts: Json, mask: Mask) -> Any:
    delta: Json = chunk.get("delta") or {}
    key = _ANTHROPIC.get(delta.get("type", ""))
    if chunk.get("type") == "content_block_delta" and key in delta and delta[key]:
        where = f"block {chunk.get('index')} {key}"
        texts[where] = texts.get(where, "") + delta[key]
        return mask(chunk | {"delta": delta | {key: TEXT}})
    return mask(chunk)
