"""Cuts the long texts of one page, so that browsers can show the page."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, cast

MAX_CHARS = 200_000
"""Maximum number of characters of one text on a page. A request may be far larger, and browsers get
slow with it."""
MAX_PAGE_CHARS = 2_000_000
"""Maximum number of characters of all texts that a page cuts. A group may have hundreds of answers.
"""
MAX_INDENTED_NESTING = 24
"""Maximum nesting of JSON that is shown with indents. The time and the length of an indented text
grow with the product of its nesting and its number of lines."""


class PageTexts:
    """The long texts of one page. A text is cut off if it is too long, or if the earlier texts have
    used up the page's limit.

    >>> PageTexts(max_chars=3).cut("four")
    'fou\\n… (1 more characters)'
    """

    def __init__(self, max_chars: int = MAX_PAGE_CHARS) -> None:
        self._num_left = max_chars

    def cut(self, text: str, max_chars: int = MAX_CHARS) -> str:
        """Return `text`, cut off at `max_chars` characters or at the page's limit."""
        num = min(len(text), max_chars, self._num_left)
        self._num_left -= num
        if num == len(text):
            return text
        return f"{text[:num]}\n… ({len(text) - num:,} more characters)"

    def json(self, text: str | None) -> str:
        """Return JSON with indents. A text that is not JSON, or is nested deeply, is returned as it
        is. A long text is cut off."""
        if text is None:
            return ""
        if len(text) <= min(MAX_CHARS, self._num_left):
            with suppress(ValueError, RecursionError):  # translates: shown as it is
                value = json.loads(text)
                if not _is_nested_deeply(value):
                    text = json.dumps(value, indent=2, ensure_ascii=False)
        return self.cut(text)


def _is_nested_deeply(value: object) -> bool:
    level = [value]
    for _ in range(MAX_INDENTED_NESTING):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else []
