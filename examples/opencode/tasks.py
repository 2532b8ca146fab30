"""What opencode is asked to do, and what must be in the workspace then. Each task is one or two
turns of one session.

    python -m examples.opencode.tasks > examples/opencode/tasks.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BELOW = 5
"""Both numbers are smaller: what agent-tiny has heard of."""
FILES = ("answer.txt", "sum.txt", "result.txt", "total.txt")
TWO_TURNS = 0.3
"""Share of sessions with a second turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One thing the user asks.

    >>> Turn.of(3, 4, "sum.txt").checks(Path("nowhere"))
    False
    """

    question: str
    file: str
    content: str

    @staticmethod
    def of(left: int, right: int, file: str) -> Turn:
        question = f"What is {left} plus {right}? Write the number to {file}"
        return Turn(question, file, str(left + right))

    def checks(self, workspace: Path) -> bool:
        """The task's test: the file is there and has the right content."""
        path = workspace / self.file
        return path.is_file() and path.read_text().strip() == self.content


def all_turns() -> list[Turn]:
    """One for each question there is: the rows of the dataset."""
    return [
        Turn.of(left, right, file)
        for left in range(BELOW)
        for right in range(BELOW)
        for file in FILES
    ]


def session(chance: random.Random) -> Sequence[Turn]:
    """The turns of one user."""
    files = chance.sample(FILES, 2 if chance.random() < TWO_TURNS else 1)
    return [Turn.of(chance.randrange(BELOW), chance.randrange(BELOW), file) for file in files]


if __name__ == "__main__":
    for turn in all_turns():
        print(json.dumps(asdict(turn)))
