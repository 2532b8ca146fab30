"""A stream by what is said in it and by its grammar.

vLLM joins what its reader has not taken yet, so how many tokens an event holds, and whether the
token that ends an answer comes with text or alone, is chance. What is said is therefore joined per
voice (a choice, an output item, a content block), and equal shapes in a row count once.
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
_SAID = frozenset({"content", "reasoning", "reasoning_content", "text", "arguments"})
"""Keys whose strings are pieces of something longer."""
_OF_TOKENS = frozenset({"token_ids", "logprobs"})
_ANTHROPIC = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
}


@dataclass(frozen=True, slots=True)
class Event:
    fields: tuple[str, ...]
    """Names of its lines: ("event", "data")."""
    name: str
    data: str

    @property
    def json(self) -> Json | None:
        try:
            value: Any = json.loads(self.data)
        except ValueError:
            return None
        return cast(Json, value) if isinstance(value, dict) else None


@dataclass
class Told:
    """A stream, compared by equality."""

    said: dict[str, Any] = field(default_factory=dict[str, Any])
    """Voice and key -> all of it, joined."""
    grammar: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """Voice -> shapes in their order."""
    order: list[str] = field(default_factory=list[str])
    """The first event's voice, and the last one's; which choice comes first is chance."""


def events_of(raw: bytes) -> list[Event]:
    """Comments and pings are left out: they may come at any time."""
    *blocks, rest = raw.decode().split("\n\n")
    found = [_event(block) for block in blocks]
    if rest:
        found.append(Event(("rest",), "", rest))
    return [event for event in found if event.fields and event.name != PING]


def _event(block: str) -> Event:
    lines = [line.partition(": ") for line in block.split("\n") if not line.startswith(":")]
    values = {name: value for name, _, value in lines}
    return Event(
        tuple(name for name, _, _ in lines), values.get("event", ""), values.get("data", "")
    )


def told(events: list[Event], mask: Mask) -> Told:
    result = Told()
    voices: list[str] = []
    for event in events:
        for voice, shape in _shapes(event, result.said, mask):
            result.grammar.setdefault(voice, []).append(
                {"lines": " ".join(event.fields), "event": event.name, "data": shape}
            )
            voices.append(voice)
    if isinstance(result.said.get(NUMBERS), int):
        result.said[NUMBERS] = "all"
    result.order = [voice.partition(" ")[0] for voice in (voices[:1] + voices[-1:])]
    result.said = dict(sorted(result.said.items()))
    for voice, shapes in result.grammar.items():
        # As text, for the order of keys counts.
        result.grammar[voice] = [
            json.loads(text) for text, _ in itertools.groupby(map(json.dumps, shapes))
        ]
    return result


def _shapes(event: Event, said: Json, mask: Mask) -> Iterator[tuple[str, Any]]:
    chunk = event.json
    if chunk is None or "error" in chunk:
        yield "stream", mask(event.json) if chunk else event.data
    elif isinstance(chunk.get("choices"), list):
        yield from _of_choices(chunk, said, mask)
    elif event.name.startswith("response."):
        yield "stream", _of_responses(chunk, said, mask)
    else:
        yield "stream", _of_messages(chunk, said, mask)


def _of_choices(chunk: Json, said: Json, mask: Mask) -> Iterator[tuple[str, Any]]:
    choices: list[Json] = chunk["choices"]
    if not choices:
        yield "stream", mask(chunk)
        return
    assert len(choices) == 1, "one choice a chunk"
    voice = f"choice {choices[0].get('index')}"
    for part in _parted(chunk):
        (choice,) = part["choices"]
        shown = part | {"choices": [_spoken(choice, voice, said)]}
        if _only_tokens(choice):
            continue
        if isinstance(chunk.get("usage"), dict):
            shown["usage"] = {key: COUNT for key in chunk["usage"]}
        yield voice, mask(shown)


def _parted(chunk: Json) -> Iterator[Json]:
    """Reasoning, what is said behind it, and the end, where they come together."""
    (choice,) = chunk["choices"]
    has_end = bool(choice.get("finish_reason"))
    nothing: Json = {"delta": {}} if "delta" in choice else {"text": EMPTY}
    said = _sayings(choice)
    parts = [*said, nothing] if has_end and said else said or [{}]
    for index, part in enumerate(parts):
        shown = choice | part
        if index > 0:  # the tokens are the first part's
            shown |= {key: _silent(shown[key]) for key in _OF_TOKENS & shown.keys()}
        if not has_end or part is parts[-1]:
            yield chunk | {"choices": [shown]}
        else:
            yield _unended(chunk) | {"choices": [_unended(shown)]}


def _sayings(choice: Json) -> list[Json]:
    """What is said, a thing each, as the fields of a choice."""
    if choice.get("text"):
        return [{"text": choice["text"]}]
    delta: Json = choice.get("delta") or {}
    calls: list[Json] = delta.get("tool_calls") or []
    spoken = {key: value for key, value in delta.items() if key not in ("reasoning", "tool_calls")}
    things: list[Json] = [{"reasoning": delta["reasoning"]}] if delta.get("reasoning") else []
    things += [spoken] if any(spoken.values()) else []
    things += [{"tool_calls": [call]} for call in calls]
    if len(things) == 1:
        return [{"delta": delta}]
    nulls = {key for key, value in delta.items() if value is None}
    return [
        {"delta": {key: thing.get(key) for key in delta if key in thing or key in nulls}}
        for thing in things
    ]


def _unended(part: Json) -> Json:
    """A chunk or a choice without what only the last one of an answer has."""
    kept = {key: value for key, value in part.items() if key != "system_fingerprint"}
    if "finish_reason" in kept:
        kept["finish_reason"] = None
        if "delta" in kept:
            del kept["stop_reason"]
        else:
            kept["stop_reason"] = None
    return kept


def _only_tokens(choice: Json) -> bool:
    """Told where ids are asked for, of tokens that a parser takes out of the text, unless vLLM
    joined them to the next."""
    is_empty = choice.get("delta") == {} and not choice.get("finish_reason")
    return is_empty and any(choice.get(key) for key in _OF_TOKENS)


def _silent(value: Any) -> Any:
    """Lists that hold nothing."""
    if isinstance(value, dict):
        return {key: _silent(inner) for key, inner in cast(Json, value).items()}
    return [] if isinstance(value, list) else value


def _spoken(value: Any, path: str, said: Json) -> Any:
    """`value` with its pieces in place of what they say, which goes into `said`."""
    if not isinstance(value, dict):
        return value
    shown: Json = {}
    for key, inner in cast(Json, value).items():
        where = f"{path} {key}"
        if key in _SAID and isinstance(inner, str) and inner:
            said[where] = said.get(where, "") + inner
            shown[key] = TEXT
        elif key in _OF_TOKENS and inner is not None:
            shown[key] = _listed(inner, where, said)
        elif key == "prompt_token_ids":  # of completions; the first chunk, whatever is joined to it
            said.setdefault(where, []).extend(inner or [])
            shown[key] = LIST
        elif key == "tool_calls" and isinstance(inner, list):
            calls = cast(list[Json], inner)
            shown[key] = [_spoken(call, f"{where} {call.get('index')}", said) for call in calls]
        else:
            shown[key] = _spoken(inner, where, said)
    return shown


def _listed(value: Any, where: str, said: Json) -> Any:
    """Lists with one element a token."""
    if isinstance(value, dict):
        return {
            key: _listed(inner, f"{where} {key}", said) if isinstance(inner, list) else inner
            for key, inner in cast(Json, value).items()
        }
    said.setdefault(where, []).extend(cast(list[Any], value))
    return LIST


def _of_responses(chunk: Json, said: Json, mask: Mask) -> Any:
    shown = chunk | {"sequence_number": COUNT}
    # One event more or less moves all that follow, so only that none is left out is told.
    number = said.setdefault(NUMBERS, 0)
    said[NUMBERS] = number + 1 if chunk.get("sequence_number") == number else "with gaps"
    if str(chunk.get("type")).endswith(".delta"):
        where = f"{chunk['type']} {chunk.get('output_index')} {chunk.get('content_index')}"
        said[where] = said.get(where, "") + chunk["delta"]
        shown["delta"] = TEXT
        if chunk.get("logprobs"):
            shown["logprobs"] = _listed(chunk["logprobs"], f"{where} logprobs", said)
    return mask(shown)


def _of_messages(chunk: Json, said: Json, mask: Mask) -> Any:
    delta: Json = chunk.get("delta") or {}
    key = _ANTHROPIC.get(delta.get("type", ""))
    if chunk.get("type") == "content_block_delta" and key in delta and delta[key]:
        where = f"block {chunk.get('index')} {key}"
        said[where] = said.get(where, "") + delta[key]
        return mask(chunk | {"delta": delta | {key: TEXT}})
    return mask(chunk)
