"""Mask the values that may differ between two equal responses: ids, times, the digits of logprobs.

An id keeps its prefix, its length, and its number among the ids of its response. Therefore a
different alphabet, or a second id in place of a repeated one, is still found.
"""

from __future__ import annotations

import re
from typing import Any, cast

Json = dict[str, Any]

_ID = re.compile(r"(?<![0-9a-zA-Z])((?:[a-zA-Z]+[-_])*)([0-9a-f]{16,40})(?![0-9a-zA-Z])")
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_TIMES = frozenset({"created", "created_at", "completed_at"})
_CACHED = "cached_tokens"
"""Field that depends on earlier requests."""
_LOGPROBS = frozenset({"logprob", "token_logprobs"})


class Mask:
    """A mask for one response, which remembers the ids that occurred."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, value: Any, key: str = "") -> Any:
        """Return a JSON value with masked ids, times and logprobs."""
        if isinstance(value, dict):
            return {name: self(inner, name) for name, inner in cast(Json, value).items()}
        if isinstance(value, list):
            return [self(inner, key) for inner in cast(list[Any], value)]
        if isinstance(value, str):
            return self.text(value)
        if key == _CACHED and isinstance(value, int):
            return "<count>"
        if key in _TIMES and isinstance(value, int | float):
            return f"<{type(value).__name__} time>"
        if isinstance(value, float) and (key in _LOGPROBS or value <= 0):
            return "<logprob>"
        return value

    def text(self, value: str) -> str:
        """Return a text with masked ids."""
        return _UUID.sub(self._uuid, _ID.sub(self._prefixed_id, value))

    def _prefixed_id(self, match: re.Match[str]) -> str:
        return f"{match[1]}<{len(match[2])} hex, id {self._number(match[2])}>"

    def _uuid(self, match: re.Match[str]) -> str:
        return f"<uuid, id {self._number(match[0])}>"

    def _number(self, id: str) -> int:
        return self._ids.setdefault(id, len(self._ids) + 1)


def shape_of(value: Any) -> Any:
    """Return the keys of a JSON value in their order, with types. A list keeps its first
    element."""
    if isinstance(value, dict):
        return {key: shape_of(inner) for key, inner in cast(Json, value).items()}
    if isinstance(value, list):
        return [shape_of(inner) for inner in cast(list[Any], value)[:1]]
    return None if value is None else f"<{type(value).__name__}>"
