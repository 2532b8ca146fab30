"""Find a string in the bytes of a JSON object, without parsing the object. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"(\s*:)?|[{}\[\]]', re.DOTALL)
"""A string (with the colon after it, if the string is a key), or a bracket."""


def find_string(raw: bytes, paths: Collection[tuple[bytes, ...]]) -> tuple[int, int] | None:
    """Return the position of the first string at one of these paths, without its quotes.

    A path is the keys that lead from the outermost object to the string. `raw` may have other bytes
    before the object, such as `data: `, and may end within the object. The result is None if there
    is no such string.

    >>> raw = b'{"id": {"id": "no"}, "model": "demo"}'
    >>> begin, end = find_string(raw, {(b"model",)})
    >>> raw[begin:end]
    b'demo'
    """
    outer: list[bytes] = []
    key = b""
    for token in _TOKEN.finditer(raw):
        text = token[0]
        if text in (b"{", b"["):
            outer.append(key)
            key = b""
        elif text in (b"}", b"]"):
            if outer:
                outer.pop()
            key = b""
        elif token[1]:
            key = text[1 : text.rindex(b'"')]
        elif key and (*outer[1:], key) in paths:
            return token.start() + 1, token.end() - 1
    return None
