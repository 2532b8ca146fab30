"""Generated requests, as they are sent over the wire and stored as JSON lines."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, cast

from tests.openapi.document import Json, Operation

MODEL = "demo"
MAX_TOKENS = 8
MAX_CHOICES = 3
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
DEFAULT_LIMITS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""Field with the limit of new tokens, by path, for formats in which a missing limit means the whole
context."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
MAX_INT = 2**31
"""Larger numbers are not changed, so that the test sees which program refuses them."""


@dataclass(frozen=True, slots=True)
class Case:
    """One generated request."""

    operation: Operation
    kind: str
    """Origin of the request: the document from which it was generated, and whether it follows the
    document's rules."""
    target: str
    """Path and query, percent-encoded."""
    content_type: str | None
    body: bytes

    def __str__(self) -> str:
        return f"{self.operation[0]} {self.target} {self.body[:3000]!r} ({self.kind})"

    @property
    def fields(self) -> Json:
        """Fields of the body, {} if it is not a JSON object."""
        try:
            value: Any = json.loads(self.body)
        except ValueError:
            return {}
        return cast(Json, value) if isinstance(value, dict) else {}


def to_json_lines(cases: Iterable[Case]) -> str:
    """Return the cases as JSON lines."""
    lines = [asdict(case) | {"body": base64.b64encode(case.body).decode()} for case in cases]
    return "".join(json.dumps(line) + "\n" for line in lines)


def from_json_lines(text: str) -> list[Case]:
    """Return the cases of a text that `to_json_lines` wrote."""
    return [_from_json(json.loads(line)) for line in text.splitlines()]


def _from_json(line: Json) -> Case:
    method, path = line.pop("operation")
    return Case((method, path), body=base64.b64decode(line.pop("body")), **line)


def limit_cost(path: str, body: Any) -> Any:
    """Return a generated body whose answer costs little: few tokens, few choices, almost greedy.

    Values that are refused are kept. The exception is the name of the model: a request for an
    unknown model is refused before its other fields are read, so half of these names are replaced.
    """
    if not isinstance(body, dict):
        return body
    limited = {**cast(Json, body)}
    for name in LIMITS:
        limited |= _capped(limited, name, MAX_TOKENS, MAX_INT)
    limited |= _capped(limited, "n", MAX_CHOICES, MAX_INT)
    limited |= _capped(limited, "temperature", MIN_TEMPERATURE, MAX_TEMPERATURE)
    if all(limited.get(name) is None for name in LIMITS) and path in DEFAULT_LIMITS:
        limited[DEFAULT_LIMITS[path]] = MAX_TOKENS
    model: Any = limited.get("model")
    if isinstance(model, str) and len(model) % 2:
        limited["model"] = MODEL
    return limited


def _capped(body: Json, name: str, maximum: float, ignored_above: float) -> Json:
    value: Any = body.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {name: maximum} if is_number and maximum < value <= ignored_above else {}
