"""Several answers to one request, in one response of type multipart/mixed. Each answer, called a
sibling, is one part of the response. The swarm server sends the part as soon as the answer is
complete.

A part has the same headers and bytes as the response to a separate call for this answer. In
addition, the part has the header PART_HEADER with the sibling's index. It also has the header
`Content-Length`, so the decoder need not search for the boundary.

This module does no I/O.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from fakevllm_adapters.http.asgi import Headers

PART_HEADER = b"x-fakevllm-sibling"
MEDIA_TYPE = "multipart/mixed"
_OWN_BOUNDARY = secrets.token_hex(8)
"""Boundary of this process's responses. All responses of a process have the same boundary, and so
the same content type. aiohttp parses a content type slowly, but caches the latest ones."""
_BOUNDARY = re.compile(r'boundary="?([^";]+)')
_LENGTH = b"content-length"
_HEAD_END = b"\r\n\r\n"
_MAX_HEAD_BYTES = 64 * 2**10
"""Maximum size of the headers of a part."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """One answer, as one part of a response with several answers to the same request."""

    index: int
    """Index of the sibling in its group."""
    headers: Headers
    body: bytes


class PartEncoder:
    """The writer of one response with several answers."""

    def __init__(self, boundary: str = _OWN_BOUNDARY) -> None:
        self._boundary = boundary.encode("latin-1")

    @property
    def headers(self) -> Headers:
        """HTTP headers of the whole response, which contains several answers as parts."""
        return [(b"content-type", b"%b; boundary=%b" % (MEDIA_TYPE.encode(), self._boundary))]

    def part(self, part: AnswerPart) -> bytes:
        """Return the bytes of one part of the response. A part contains one answer."""
        fields = [*part.headers, (PART_HEADER, b"%d" % part.index)]
        fields.append((_LENGTH, b"%d" % len(part.body)))
        head = b"".join(b"%b: %b\r\n" % field for field in fields)
        return b"--%b\r\n%b\r\n%b\r\n" % (self._boundary, head, part.body)

    def end(self) -> bytes:
        """Return the bytes that end the response after its last part."""
        return b"--%b--\r\n" % self._boundary


class PartDecoder:
    """The reader of one response with several answers. The response may be cut into chunks at any
    byte.

    >>> encoder = PartEncoder("b")
    >>> decoder = PartDecoder("multipart/mixed; boundary=b")
    >>> decoder.feed(encoder.part(AnswerPart(3, [], b"Hi")) + encoder.end())
    [AnswerPart(index=3, headers=[], body=b'Hi')]
    """

    def __init__(self, content_type: str) -> None:
        """Create the reader. Raises ValueError if the content type is not that of a response with
        several answers."""
        match = _BOUNDARY.search(content_type)
        if not content_type.startswith(MEDIA_TYPE) or match is None:
            raise ValueError(f"not a response with several answers: {content_type!r}")
        self._opening = b"--" + match[1].encode("latin-1") + b"\r\n"
        self._chunks: list[bytes] = []
        """Chunks of an incomplete part. They are joined only when the part can be complete."""
        self._num_bytes = 0
        self._num_needed = 0
        """Lower bound on the number of bytes of the first part in `_chunks`."""

    def feed(self, chunk: bytes) -> list[AnswerPart]:
        """Return the parts (answers) of the response that the new chunk completes.

        Raises ValueError for a malformed part. If complete parts precede the malformed part, they
        are returned first. The next call of `feed` raises the error.
        """
        self._chunks.append(chunk)
        self._num_bytes += len(chunk)
        if self._num_bytes < self._num_needed:
            return []
        buffer = b"".join(self._chunks)
        parts: list[AnswerPart] = []
        at = 0
        try:
            while (split := self._next_part(buffer, at)) is not None:
                part, at = split
                parts.append(part)
        except ValueError:
            if not parts:
                raise
        self._chunks, self._num_bytes = [buffer[at:]], len(buffer) - at
        self._num_needed = max(0, self._num_needed - at)
        return parts

    def _next_part(self, buffer: bytes, at: int) -> tuple[AnswerPart, int] | None:
        """Return the part that begins at `at`, and the position after the part. Return None if the
        part is incomplete, or if the response ends at `at`."""
        head_end = buffer.find(_HEAD_END, at)
        if head_end < 0:
            if len(buffer) - at > _MAX_HEAD_BYTES:
                raise ValueError("the headers of an answer are too long")
            return None
        if not buffer.startswith(self._opening, at):
            raise ValueError("an answer does not begin with the boundary")
        headers = _parse_headers(buffer[at + len(self._opening) : head_end].split(b"\r\n"))
        numbers = {name: value for name, value in headers if name in (PART_HEADER, _LENGTH)}
        begin = head_end + len(_HEAD_END)
        end = begin + int(numbers.get(_LENGTH, b""))
        self._num_needed = end + 2
        if len(buffer) < self._num_needed:
            return None
        own = [field for field in headers if field[0] not in numbers]
        part = AnswerPart(int(numbers.get(PART_HEADER, b"")), own, buffer[begin:end])
        return part, end + 2


def _parse_headers(lines: Sequence[bytes]) -> Headers:
    headers: Headers = []
    for line in lines:
        name, colon, value = line.partition(b": ")
        if not colon:
            raise ValueError("an answer has a malformed header")
        headers.append((name, value))
    return headers
