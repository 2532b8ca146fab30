"""The tasks, and the tests of the workspace. A session has one or two turns.

python -m examples.opencode.tasks > examples/opencode/tasks.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LIMIT = 5
"""Both numbers of a sum are below this limit. The model agent-tiny was trained only on such
numbers."""
FILES = ("answer.txt", "sum.txt", "result.txt", "total.txt")
TWO_TURNS_PROBABILITY = 0.3
"""Probability that a session has a second turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the user, and the file that must exist afterwards.

    >>> Turn.from_sum(3, 4, "sum.txt").passes(Path("nowhere"))
    False
    """

    question: str
    file: str
    content: str

    @staticmethod
    def from_sum(left: int, right: int, file: str) -> Turn:
        question = f"What is {left} plus {right}? Write the number to {file}"
        return Turn(question, file, str(left + right))

    def passes(self, workspace: Path) -> bool:
        """Return whether the file exists in the workspace and has the right content."""
        path = workspace / self.file
        return path.is_file() and path.read_text().strip() == self.content


def all_turns() -> list[Turn]:
    """Return one turn for each possible question: the rows of the dataset."""
    return [
        Turn.from_sum(left, right, file)
        for left in range(LIMIT)
        for right in range(LIMIT)
        for file in FILES
    ]


def random_session(rng: random.Random) -> Sequence[Turn]:
    """Return the turns of one session."""
    files = rng.sample(FILES, 2 if rng.random() < TWO_TURNS_PROBABILITY else 1)
    return [Turn.from_sum(rng.randrange(LIMIT), rng.randrange(LIMIT), file) for file in files]


if __name__ == "__main__":
    for turn in all_turns():
        print(json.dumps(asdict(turn)))
