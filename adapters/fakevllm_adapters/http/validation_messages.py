"""Messages of one line for pydantic's validation errors. Each message contains the field, the
problem and the value.

This module does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)

SHOWN_CHARS = 80
"""Maximum number of characters of a quoted value."""
_BRANCH = re.compile(r"(float|int|str|bool|.+\[.*\])")
"""Pattern for names that pydantic adds to an error's location if the field has a union type. The
user did not write these names."""


def one_line(problems: Iterable[Any]) -> str:
    """Return one line that describes validation errors. Only the first error of each field is
    included.

    >>> one_line([{"type": "missing", "loc": ("body", "a"), "msg": "Field required", "input": {}}])
    'a: Field required'
    """
    texts: dict[str, str] = {}
    for problem in problems:
        texts.setdefault(_place(problem["loc"]), problem_text(problem))
    return "; ".join(f"{place}: {text}" for place, text in texts.items())


def problem_text(problem: Any) -> str:
    """Return the text of a validation error without the field's location."""
    text = str(problem["msg"]).removeprefix("Value error, ")
    is_missing = problem["type"] == "missing"
    return text if is_missing else f"{text}, got {repr(problem['input'])[:SHOWN_CHARS]}"


def closest_name(name: str, known: Iterable[str], unused: Container[str] = ()) -> str | None:
    """Return the known name whose spelling is closest to `name`, or None if no name is close. A
    name in `unused` (names that have no effect) is returned only if no other name is close.

    >>> closest_name("num_repeats", ["lr", "num_repeat"]), closest_name("x", ["lr"])
    ('num_repeat', None)
    >>> closest_name("aabb", ["aab", "aa"]), closest_name("aabb", ["aab", "aa"], {"aab"})
    ('aab', 'aa')
    """
    matches = get_close_matches(name, known)
    return min(matches, key=lambda match: match in unused, default=None)


def validated(model: type[M], **fields: Any) -> M:
    """Return an instance of a pydantic model with these fields.

    Raises ValueError with a one-line message if the fields are invalid.
    """
    try:
        return model(**fields)
    except ValidationError as error:
        raise ValueError(one_line(error.errors(include_url=False))) from None


def _place(parts: Sequence[object]) -> str:
    named = [str(part) for part in parts if not _BRANCH.fullmatch(str(part))]
    return repr(".".join(named).removeprefix("body."))[1:-1][:SHOWN_CHARS]
