"""Requests that unmodified clients made, where such recordings lie beside the checkout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "shared" / "traffic"
"""`<client>.jsonl`, one request a line; large values stand there once, `{"$id", "value"}`, and are
`{"$same_as"}` from then on."""


@dataclass(frozen=True, slots=True)
class Recorded:
    client: str
    scenario: str
    seq: int
    path: str
    headers: dict[bytes, bytes]
    body: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.client}/{self.scenario}/{self.seq}"


def recorded() -> list[Recorded]:
    """All that have a body, in the order of their arrival within each file."""
    return [one for file in sorted(FOLDER.glob("*.jsonl")) for one in _of(file)]


def _of(file: Path) -> list[Recorded]:
    seen: dict[str, Any] = {}

    def whole(part: Any) -> Any:
        if isinstance(part, list):
            return [whole(one) for one in part]  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(part, dict):
            return part
        if set(part) == {"$id", "value"}:  # pyright: ignore[reportUnknownArgumentType]
            seen[part["$id"]] = part["value"]
            return part["value"]  # pyright: ignore[reportUnknownVariableType]
        if set(part) == {"$same_as"}:  # pyright: ignore[reportUnknownArgumentType]
            return seen[part["$same_as"]]
        return {key: whole(value) for key, value in part.items()}  # pyright: ignore[reportUnknownVariableType]

    lines = [whole(json.loads(line)) for line in file.read_text().splitlines()]
    return [
        Recorded(
            file.stem,
            line["scenario"],
            line["seq"],
            line["path"],
            {name.lower().encode(): value.encode() for name, value in line["headers"].items()},
            line["body"],
        )
        for line in lines
        if isinstance(line["body"], dict)
    ]
