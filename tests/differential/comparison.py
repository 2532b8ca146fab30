"""Compare two responses to one request, and describe each difference in a line."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import orjson

from tests.differential.masking import Json, Mask, shape_of
from tests.differential.raw_http import RawResponse
from tests.differential.streams import Event, normalize, parse_events

_CONNECTION_HEADERS = frozenset({"date", "content-length"})
_RECEIPT_HEADERS = frozenset({"x-fakevllm-group", "x-fakevllm-version"})
_NOT_COMPARED = _CONNECTION_HEADERS | _RECEIPT_HEADERS
_OWN_URL = re.compile(r"http://127\.0\.0\.1:\d+")
NUM_SHOWN = 300
MISSING = "(nothing)"


def differences(direct: RawResponse, ours: RawResponse, *, is_free: bool = False) -> list[str]:
    """Return the differences as lines of the form "place: vLLM's -> ours".

    If `is_free` is set, the sampled texts may differ.
    """
    is_free = is_free and direct.status == 200
    lines = [*_headers(direct, ours)]
    if direct.status != ours.status:
        bodies = _line("body", _text(direct.body), _text(ours.body))
        return [f"status: {direct.status} -> {ours.status}", bodies, *lines]
    if direct.is_whole != ours.is_whole:
        lines.append(f"complete: {direct.is_whole} -> {ours.is_whole}")
    if direct.is_stream and ours.is_stream:
        lines += _streams(direct, ours, is_free)
    else:
        lines += _bodies(direct, ours, is_free)
    return lines


def _headers(direct: RawResponse, ours: RawResponse) -> Iterator[str]:
    one, other = _header_values(direct), _header_values(ours)
    for name in sorted(one.keys() | other.keys()):
        if one[name] != other[name]:
            yield _line(f"header {name}", _joined(one[name]), _joined(other[name]))


def _header_values(response: RawResponse) -> dict[str, list[str]]:
    values = defaultdict[str, list[str]](list)
    for name, value in response.headers:
        if name.lower() not in _NOT_COMPARED:
            values[name].append(_OWN_URL.sub("http://<here>", value))
    has_length = any(name.lower() == "content-length" for name, _ in response.headers)
    values["content-length (there or not)"] = [str(has_length)]
    return values


def _joined(values: list[str]) -> str:
    return " and ".join(values) or MISSING


def _bodies(direct: RawResponse, ours: RawResponse, is_free: bool) -> Iterator[str]:
    one, other = _json(direct.body), _json(ours.body)
    if one is None or other is None:
        if direct.body != ours.body:
            yield _line("body", _text(direct.body), _text(ours.body))
        return
    yield from _within("body", _shown(one, is_free), _shown(other, is_free))
    if not writers([direct.body]) & writers([ours.body]):
        yield f"body is written: {writers([direct.body])} -> {writers([ours.body])}"


def _shown(value: Any, is_free: bool) -> Any:
    return shape_of(value) if is_free else Mask()(value)


def _streams(direct: RawResponse, ours: RawResponse, is_free: bool) -> Iterator[str]:
    events = parse_events(direct.body), parse_events(ours.body)
    one, other = (normalize(stream, Mask()) for stream in events)
    yield from _within("stream order", one.order, other.order)
    for channel in one.grammar.keys() | other.grammar.keys():
        shapes = [grammar.get(channel, []) for grammar in (one.grammar, other.grammar)]
        if is_free:
            shapes = [[shape_of(shape) for shape in stream] for stream in shapes]
        yield from _within(f"grammar of {channel}", *shapes)
    if not is_free:
        yield from _within("text", Mask()(one.texts), Mask()(other.texts))
    writing = [
        writers([event.data.encode() for event in _json_events(stream)]) for stream in events
    ]
    if not writing[0] & writing[1]:
        yield f"events are written: {writing[0]} -> {writing[1]}"


def _json_events(events: list[Event]) -> list[Event]:
    return [event for event in events if event.json is not None]


def writers(texts: list[bytes]) -> set[str]:
    """Return the names of the JSON writers that write all these texts in exactly this form. Writers
    differ in floats and spaces."""
    candidates = {"compact": _compact, "orjson": orjson.dumps, "spaced": _spaced}
    values = [json.loads(text) for text in texts]
    return {
        name
        for name, write in candidates.items()
        if all(write(value) == text for value, text in zip(values, texts, strict=True))
    } or {"another"}


def _compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _spaced(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _within(where: str, one: Any, other: Any) -> Iterator[str]:
    """Yield a line for each place at which two JSON values differ. Each place is as deep in the
    values as possible."""
    if isinstance(one, dict) and isinstance(other, dict):
        yield from _objects(where, cast(Json, one), cast(Json, other))
    elif isinstance(one, list) and isinstance(other, list):
        mine, theirs = cast(list[Any], one), cast(list[Any], other)
        if len(mine) != len(theirs):
            yield _line(f"{where} (length {len(mine)} -> {len(theirs)})", mine, theirs)
            return
        for index, pair in enumerate(zip(mine, theirs, strict=True)):
            yield from _within(f"{where}[{index}]", *pair)
    elif not _is_same(one, other):
        yield _line(where, one, other)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether type and value are equal: 1, 1.0 and true are different."""
    return type(one) is type(other) and one == other


def _objects(where: str, one: Json, other: Json) -> Iterator[str]:
    shared = [key for key in one if key in other]
    for key in one.keys() - other.keys():
        yield _line(f"{where}.{key}", one[key], MISSING)
    for key in other.keys() - one.keys():
        yield _line(f"{where}.{key}", MISSING, other[key])
    if shared != [key for key in other if key in one]:
        yield _line(f"{where} (order of keys)", list(one), list(other))
    for key in shared:
        yield from _within(f"{where}.{key}", one[key], other[key])


def _line(where: str, one: Any, other: Any) -> str:
    return f"{where}: {_short(one)} -> {_short(other)}"


def _short(value: Any) -> str:
    shown: Any = value
    text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
    return text if len(text) <= NUM_SHOWN else f"{text[:NUM_SHOWN]}…"


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _text(body: bytes) -> str:
    return repr(body.decode(errors="replace"))
