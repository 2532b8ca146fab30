"""One HTTP answer of vLLM's, as it came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import orjson

Json = dict[str, Any]

LONGEST_DETAIL = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """Status 0 where none came, and why then in `body`."""

    status: int
    body: bytes

    @property
    def is_ok(self) -> bool:
        return self.status == 200

    @property
    def json(self) -> Json:
        """Empty where the body is no JSON object."""
        return object_in(self.body)

    @property
    def detail(self) -> str:
        """Why it failed, in one line."""
        error = self.json.get("error")
        told = as_object(error).get("message") or error or self.body.decode(errors="replace")
        where = f"HTTP {self.status}: " if self.status else ""
        return where + " ".join(str(told).split())[:LONGEST_DETAIL]


def object_in(text: bytes | str) -> Json:
    try:
        return as_object(orjson.loads(text))
    except ValueError:
        return {}


def as_object(value: object) -> Json:
    """Empty for anything else."""
    return cast(Json, value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Empty for anything else."""
    return cast(list[Any], value) if isinstance(value, list) else []
