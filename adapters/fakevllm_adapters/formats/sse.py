"""Server-sent events as bytes: cut a stream into events, read an event's data, write one.

Events keep their exact bytes, so that what was received can be relayed without a trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, cast

import orjson

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: every recorded client ignores it, and it resets their read time-outs."""

_SEPARATOR = re.compile(rb"\n\n|\r\n\r\n|\r\r")
_LONGEST = 4


class SseDecoder:
    """Cuts a byte stream into events, whatever the chunk boundaries.

    >>> decoder = SseDecoder()
    >>> decoder.feed(b"data: 1\\n\\ndata"), decoder.feed(b": 2\\n\\n")
    ([b'data: 1\\n\\n'], [b'data: 2\\n\\n'])
    """

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        """Chunks of an event that has no end yet; joined once, for an event may be long."""
        self._seam = b""
        """The last of these bytes, among which a separator may have begun."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events completed by `chunk`, each with its separator."""
        is_whole = chunk.endswith(b"\n\n") and chunk.find(b"\n\n") == len(chunk) - 2
        if is_whole and not self._seam and b"\r" not in chunk:  # nearly always
            return [chunk]
        seam = self._seam + chunk
        if b"\n\n" not in seam and not (b"\r" in seam and _SEPARATOR.search(seam)):
            self._begun.append(chunk)
            self._seam = seam[-_LONGEST + 1 :]
            return []
        *events, rest = _cut(b"".join([*self._begun, chunk]))
        self._begun, self._seam = [rest], rest[-_LONGEST + 1 :]
        return events

    def rest(self) -> bytes:
        """Bytes of an event that was never finished."""
        return b"".join(self._begun)


def _cut(buffer: bytes) -> list[bytes]:
    """The events in it, and what is left behind the last."""
    if b"\r" not in buffer:  # nearly always, and several times as fast
        *whole, rest = buffer.split(b"\n\n")
        return [*(event + b"\n\n" for event in whole), rest]
    ends = [0, *(separator.end() for separator in _SEPARATOR.finditer(buffer)), len(buffer)]
    return [buffer[begin:end] for begin, end in pairwise(ends)]


def data_of(event: bytes) -> bytes | None:
    """The joined `data:` lines of one event; None for comments and for the closing `[DONE]`."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        data = event[6:-2]  # nearly always, and several times as fast
        return data if data != b"[DONE]" else None
    lines = [
        line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")
    ]
    data = b"\n".join(lines)
    return data if lines and data != b"[DONE]" else None


def json_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object of one event; None where there is none."""
    data = data_of(event)
    if data is None:
        return None
    value: Any = orjson.loads(data)
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def jsons_of(events: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON objects of many events, read at once. Raises ValueError as `json_of`."""
    data = [found for found in map(data_of, events) if found is not None]
    values: list[Any] = orjson.loads(b"[" + b",".join(data) + b"]")
    if len(values) != len(data):
        raise ValueError("an event is no JSON by itself")
    return [cast(dict[str, Any], value) for value in values if isinstance(value, dict)]


def encode(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
