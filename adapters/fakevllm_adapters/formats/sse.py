"""Functions that split a stream into server-sent events, and that parse and encode events.

Events keep their exact bytes, so that a received event can be relayed unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

import orjson

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment event. Every tested client ignores the content of this event, and restarts its read
timeout when the event arrives."""

_DATA, _NEXT_DATA = b"data: ", b"\n\ndata: "
_SEPARATOR = re.compile(rb"\n\n|\r\n\r\n|\r\r")
_LONGEST_SEPARATOR = 4
"""Length of the longest separator, in bytes."""


class SseDecoder:
    """A decoder that splits a byte stream into server-sent events. The stream may arrive in chunks
    of any size.

    >>> decoder = SseDecoder()
    >>> decoder.feed(b"data: 1\\n\\ndata"), decoder.feed(b": 2\\n\\n")
    ([b'data: 1\\n\\n'], [b'data: 2\\n\\n'])
    """

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        """Chunks of an incomplete event. They are joined only once, because an event may be
        long."""
        self._seam = b""
        """The last bytes of the incomplete event's chunks, in which a separator may begin."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the events that are complete now that `chunk` has arrived. Each event ends with
        its separator."""
        end = len(chunk) - 2
        # A search for one byte is several times as fast, and suffices for an event of one line.
        is_whole = chunk.endswith(b"\n\n") and (
            chunk.find(b"\n") == end or chunk.find(b"\n\n") == end
        )
        if is_whole and not self._seam and b"\r" not in chunk:  # the usual case
            return [chunk]
        seam = self._seam + chunk
        if b"\n\n" not in seam and not (b"\r" in seam and _SEPARATOR.search(seam)):
            self._begun.append(chunk)
            self._seam = seam[-_LONGEST_SEPARATOR + 1 :]
            return []
        *events, rest = _cut(b"".join([*self._begun, chunk]))
        self._begun, self._seam = [rest], rest[-_LONGEST_SEPARATOR + 1 :]
        return events

    def rest(self) -> bytes:
        """Return the bytes of the event that has begun to arrive and is not complete yet."""
        return b"".join(self._begun)


def _cut(buffer: bytes) -> list[bytes]:
    """Split a buffer into events. The last element of the result is the incomplete rest of the
    buffer."""
    if b"\r" not in buffer:  # the usual case, several times as fast
        *whole, rest = buffer.split(b"\n\n")
        return [*[event + b"\n\n" for event in whole], rest]
    ends = [0, *(separator.end() for separator in _SEPARATOR.finditer(buffer)), len(buffer)]
    return [buffer[begin:end] for begin, end in pairwise(ends)]


def data_of(event: bytes) -> bytes | None:
    """Return the content of an event's `data:` lines, joined with line breaks.

    Return None for an event without data, such as a comment, and for the final event `[DONE]`.
    """
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        data = event[6:-2]  # the usual case, several times as fast
        return data if data != b"[DONE]" else None
    lines = [
        line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")
    ]
    data = b"\n".join(lines)
    return data if lines and data != b"[DONE]" else None


def parse_event(event: bytes) -> dict[str, Any] | None:
    """Return the JSON object in an event's data. Return None for an event without a JSON object,
    such as a comment or `[DONE]`.

    Raises ValueError for malformed JSON.
    """
    data = data_of(event)
    if data is None:
        return None
    value: Any = orjson.loads(data)
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def parse_events(events: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the JSON objects of many events at once. Raises ValueError for malformed JSON."""
    data, num = _joined_data(list(events))
    values: list[Any] = orjson.loads(b"[" + data + b"]")
    if len(values) != num:
        raise ValueError("an event is not one JSON value")
    return cast(list[dict[str, Any]], [value for value in values if isinstance(value, dict)])


def _joined_data(events: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the data of the events, separated by commas, and the number of events with data."""
    if events and events[-1] == DONE:
        events = events[:-1]
    body = b"".join(events)
    num = len(events)
    is_plain = body.startswith(_DATA) and body.endswith(b"\n\n") and b"\r" not in body
    is_plain = is_plain and DONE not in body
    # Each event is one line of data, if there are no other lines and no other beginnings of data.
    if is_plain and body.count(b"\n") == 2 * num and body.count(_NEXT_DATA) == num - 1:
        return body[len(_DATA) : -2].replace(_NEXT_DATA, b","), num
    data = [line for line in map(data_of, events) if line is not None]
    return b",".join(data), len(data)


def encode(value: object) -> bytes:
    """Encode a JSON value as an event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"
