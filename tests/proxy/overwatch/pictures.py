"""Write the pictures that the tests compare with. Review the changes before you commit them.

python -m tests.proxy.overwatch.pictures
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.proxy.overwatch.cases import CASES, WIDTHS, rendered_text

FOLDER = Path(__file__).parent / "pictures"


def pictures() -> Iterator[tuple[str, int]]:
    """Yield the case and the width of each picture."""
    for name in CASES:
        for width in WIDTHS.get(name, (80,)):
            yield name, width


def picture_file(name: str, width: int) -> Path:
    return FOLDER / f"{name}.{width}.txt"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, width in pictures():
        picture_file(name, width).write_text(rendered_text(CASES[name], width))
