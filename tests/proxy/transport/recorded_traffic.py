"""Recorded requests of unmodified clients, if recordings are stored beside the checkout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks.recorded_traffic import FOLDER as FOLDER
from benchmarks.recorded_traffic import expand_lines


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded request."""

    client: str
    scenario: str
    seq: int
    path: str
    headers: dict[bytes, bytes]
    body: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.client}/{self.scenario}/{self.seq}"


def recorded() -> list[Recorded]:
    """Return all recorded requests that have a body, in the order of arrival within each file."""
    return [request for file in sorted(FOLDER.glob("*.jsonl")) for request in _read(file)]


def _read(file: Path) -> list[Recorded]:
    return [
        Recorded(
            file.stem,
            line["scenario"],
            line["seq"],
            line["path"],
            {name.lower().encode(): value.encode() for name, value in line["headers"].items()},
            cast(dict[str, Any], line["body"]),
        )
        for line in expand_lines(file.read_text().splitlines())
        if isinstance(line["body"], dict)
    ]
