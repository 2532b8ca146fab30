"""What a body or an argument lacks, in one line: where, what is wrong, what was given. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)

SHOWN_CHARS = 80
_BRANCH = re.compile(r"(float|int|str|bool|.+\[.*\])")
"""Of a type with several, as pydantic names what it tried: nothing that a user wrote."""


def one_line(problems: Iterable[Any]) -> str:
    """
    >>> one_line([{"type": "missing", "loc": ("body", "a"), "msg": "Field required", "input": {}}])
    'a: Field required'
    """
    told: dict[str, str] = {}
    for problem in problems:
        told.setdefault(_place(problem["loc"]), said(problem))
    return "; ".join(f"{place}: {text}" for place, text in told.items())


def said(problem: Any) -> str:
    """Of one problem, without its place."""
    text = str(problem["msg"]).removeprefix("Value error, ")
    is_missing = problem["type"] == "missing"
    return text if is_missing else f"{text}, got {repr(problem['input'])[:SHOWN_CHARS]}"


def meant_by(name: str, known: Iterable[str]) -> str | None:
    """What is spelt nearly so.

    >>> meant_by("num_repeats", ["lr", "num_repeat"]), meant_by("x", ["lr"])
    ('num_repeat', None)
    """
    return next(iter(get_close_matches(name, known, 1)), None)


def made(kind: type[M], **given: Any) -> M:
    """Raises ValueError, in one line."""
    try:
        return kind(**given)
    except ValidationError as error:
        raise ValueError(one_line(error.errors(include_url=False))) from None


def _place(parts: Sequence[object]) -> str:
    named = [str(part) for part in parts if not _BRANCH.fullmatch(str(part))]
    return repr(".".join(named).removeprefix("body."))[1:-1][:SHOWN_CHARS]
