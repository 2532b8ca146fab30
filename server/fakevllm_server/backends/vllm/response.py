"""An HTTP response of vLLM, and functions that read JSON from the response without raising
errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import orjson

Json = dict[str, Any]

MAX_DETAIL_CHARS = 300


@dataclass(frozen=True, slots=True)
class VllmResponse:
    """An HTTP response of vLLM. If there was no response, `status` is 0, and `body` contains the
    reason."""

    status: int
    body: bytes

    @property
    def is_ok(self) -> bool:
        return self.status == 200

    @property
    def json(self) -> Json:
        """The response's body as a JSON object. Empty if the body is not a JSON object."""
        return parse_object(self.body)

    @property
    def detail(self) -> str:
        """One line of text with the HTTP status and the reason for a failure. The reason is from
        the response body, and is cut to `MAX_DETAIL_CHARS` characters."""
        error = self.json.get("error")
        message = as_object(error).get("message") or error or self.body.decode(errors="replace")
        prefix = f"HTTP {self.status}: " if self.status else ""
        return prefix + " ".join(str(message).split())[:MAX_DETAIL_CHARS]


def parse_object(text: bytes | str) -> Json:
    """Parse a JSON object. Return {} for any other text."""
    try:
        return as_object(orjson.loads(text))
    except ValueError:
        return {}


def as_object(value: object) -> Json:
    """Return `value` if it is a JSON object (dict). Return {} for any other value."""
    return cast(Json, value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return `value` if it is a JSON list. Return [] for any other value."""
    return cast(list[Any], value) if isinstance(value, list) else []
