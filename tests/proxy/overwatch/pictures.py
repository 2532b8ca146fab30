"""Draws the pictures that the tests compare with; look at what changed before it is committed.

python -m tests.overwatch.pictures
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.proxy.overwatch.cases import CASES, WIDTHS, text_of

FOLDER = Path(__file__).parent / "pictures"


def pictures() -> Iterator[tuple[str, int]]:
    for name in CASES:
        for width in WIDTHS.get(name, (80,)):
            yield name, width


def file_of(name: str, width: int) -> Path:
    return FOLDER / f"{name}.{width}.txt"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, width in pictures():
        file_of(name, width).write_text(text_of(CASES[name], width))
