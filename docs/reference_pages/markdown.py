"""Markdown of the generated pages: tables, code spans, and the head of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COMMAND = "just reference"
"""Command that writes all generated pages."""
NOTHING = "–"
"""Cell of a table in which a row has no value."""
_CODE = re.compile(r"(`[^`]*`)")
_SPECIAL = re.compile(r"[<*_\[\]]")


@dataclass(frozen=True, slots=True)
class Page:
    """A generated page. `__main__` writes its text to `docs/reference/`."""

    title: str
    introduction: str
    """What the reader finds on the page, with a link to the page that explains it."""
    sections: Sequence[str]

    @property
    def text(self) -> str:
        note = f"<!-- `{COMMAND}` writes this page from the code. Do not edit it by hand. -->"
        return "\n\n".join((f"# {self.title}", note, self.introduction, *self.sections)) + "\n"


def code(value: object) -> str:
    """Return a value as a code span for a table.

    >>> code(8)
    '`8`'
    """
    text = f"`{value}`"
    # Python-Markdown shows the backslash of an escaped pipe in a code span, and GitHub does not.
    assert "|" not in text, f"{text} has a pipe, which no code span in a table can show"
    return text


def prose(text: str) -> str:
    """Return a text for a table or a paragraph. Characters that Markdown reads as markup are
    escaped, except in code spans.

    >>> prose("`a_b` | <c_d>")
    '`a_b` \\\\| \\\\<c\\\\_d>'
    """
    parts = _CODE.split(text)
    parts[::2] = [_SPECIAL.sub(r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. An empty cell gets a dash. A column in which no row has a value is left out.

    The cells must be escaped already, by `code` or `prose`.
    """
    lines = [list(row) for row in rows]
    used = [index for index in range(len(head)) if any(line[index] for line in lines)]
    cells = [[line[index] or NOTHING for index in used] for line in lines]
    written = [[head[index] for index in used], ["---"] * len(used), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in written)


def section(title: str, *parts: str, level: int = 2) -> str:
    """Return a section of a page. Empty parts are left out."""
    return "\n\n".join((f"{'#' * level} {title}", *filter(None, parts)))
