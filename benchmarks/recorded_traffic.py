"""Requests that unmodified clients made, where such recordings lie beside the checkout.

`<client>.jsonl`, one request a line; large values stand there once, as `{"$id", "value"}`, and are
`{"$same_as"}` from then on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

FOLDER = Path(__file__).parents[2] / "shared/traffic"


def expanded(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The requests of one file, whole."""
    seen: dict[str, Any] = {}

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(one) for one in cast(list[Any], value)]
        if not isinstance(value, dict):
            return value
        held = cast(dict[str, Any], value)
        if set(held) == {"$id", "value"}:
            seen[held["$id"]] = held["value"]
            return held["value"]
        if set(held) == {"$same_as"}:
            return seen[held["$same_as"]]
        return {key: whole(one) for key, one in held.items()}

    return [whole(json.loads(line)) for line in lines]
