"""Recorded requests of unmodified clients, if a folder of recordings lies beside the checkout.

Each file `<client>.jsonl` has one request on each line. The first occurrence of a large value is
written as `{"$id": id, "value": value}`. Later occurrences of this value are written as
`{"$same_as": id}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

FOLDER = Path(__file__).parents[2] / "shared/traffic"


def expand_lines(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the requests of one file with all repeated values put back."""
    values: dict[str, Any] = {}

    def expand(value: Any) -> Any:
        if isinstance(value, list):
            return [expand(item) for item in cast(list[Any], value)]
        if not isinstance(value, dict):
            return value
        node = cast(dict[str, Any], value)
        if set(node) == {"$id", "value"}:
            values[node["$id"]] = node["value"]
            return node["value"]
        if set(node) == {"$same_as"}:
            return values[node["$same_as"]]
        return {key: expand(item) for key, item in node.items()}

    return [expand(json.loads(line)) for line in lines]
