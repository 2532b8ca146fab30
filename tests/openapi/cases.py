"""Generated requests as they go over the wire."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, cast

from tests.openapi.document import Json, Operation

MODEL = "demo"
MOST_TOKENS = 8
MOST_CHOICES = 3
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
DEFAULT_LIMITS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""Where the limit of new tokens may be missing, and is what the context holds then."""
COLDEST, HOTTEST = 0.01, 2.0
FAR = 2**31
"""Numbers beyond it are refused by somebody, and it should be seen by whom."""


@dataclass(frozen=True, slots=True)
class Case:
    operation: Operation
    kind: str
    """How it was made: of which document, and whether by its rules or against them."""
    target: str
    """Path and query, quoted."""
    content_type: str | None
    body: bytes

    def __str__(self) -> str:
        return f"{self.operation[0]} {self.target} {self.body[:3000]!r} ({self.kind})"

    @property
    def fields(self) -> Json:
        """Of the body, where it is an object."""
        try:
            value: Any = json.loads(self.body)
        except ValueError:
            return {}
        return cast(Json, value) if isinstance(value, dict) else {}


def written(cases: Iterable[Case]) -> str:
    lines = [asdict(case) | {"body": base64.b64encode(case.body).decode()} for case in cases]
    return "".join(json.dumps(line) + "\n" for line in lines)


def read(text: str) -> list[Case]:
    return [_read(json.loads(line)) for line in text.splitlines()]


def _read(line: Json) -> Case:
    method, path = line.pop("operation")
    return Case((method, path), body=base64.b64decode(line.pop("body")), **line)


def tamed(path: str, body: Any) -> Any:
    """A generated body that costs little to answer: few tokens, few choices, and all but the
    likeliest token never sampled. Values that are refused stay as they are, but for every second
    model nobody knows: such a request is refused before it is looked at."""
    if not isinstance(body, dict):
        return body
    tame = {**cast(Json, body)}
    for name in LIMITS:
        tame |= _capped(tame, name, MOST_TOKENS, FAR)
    tame |= _capped(tame, "n", MOST_CHOICES, FAR)
    tame |= _capped(tame, "temperature", COLDEST, HOTTEST)
    if all(tame.get(name) is None for name in LIMITS) and path in DEFAULT_LIMITS:
        tame[DEFAULT_LIMITS[path]] = MOST_TOKENS
    model: Any = tame.get("model")
    if isinstance(model, str) and len(model) % 2:
        tame["model"] = MODEL
    return tame


def _capped(body: Json, name: str, most: float, beyond: float) -> Json:
    value: Any = body.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {name: most} if is_number and most < value <= beyond else {}
