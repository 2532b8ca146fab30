"""Find a string in the bytes of a JSON object, without parsing the object. This module does no
I/O."""

from __future__ import annotations

import re
from collections.abc import Collection

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:(")(\s*+:)?|\\?\Z)|[{}\[\]]', re.DOTALL)
"""Pattern for a string (with the colon after it, if the string is a key), or for a bracket.

A string without its closing quote reaches to the end of the bytes. The quantifiers are possessive,
because backtracking into such a string would take quadratic time.
"""


def find_string(raw: bytes, paths: Collection[tuple[bytes, ...]]) -> tuple[int, int] | None:
    """Return the position of the first string that is at one of `paths`. The position is a pair
    (begin, end), and excludes the string's quotes.

    A path is a tuple of keys that lead from the outermost object to the string. `raw` may have
    other bytes before the object, such as `data: `, and may end within the object. The result is
    None if `raw` has no such string or ends within the string. The time is linear in the size of
    `raw`.

    >>> raw = b'{"id": {"id": "no"}, "model": "demo"}'
    >>> begin, end = find_string(raw, {(b"model",)})
    >>> raw[begin:end]
    b'demo'
    """
    max_depth = max(map(len, paths))
    outer: list[bytes] = []
    key, key_end = b"", 0
    for token in _TOKEN.finditer(raw):
        text = token[0]
        if text in (b"{", b"["):
            outer.append(key)
            key = b""
        elif text in (b"}", b"]"):
            if outer:
                outer.pop()
            key = b""
        elif token[2]:
            key, key_end = text[1 : token.end(1) - token.start() - 1], token.end()
        elif not token[1]:
            return None
        else:
            is_value = len(outer) <= max_depth and not raw[key_end : token.start()].strip()
            if is_value and (*outer[1:], key) in paths:
                return token.start() + 1, token.end() - 1
            key = b""
    return None
