"""The demo's task: sums of two small numbers, asked and answered in words. Loads no torch."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

MAX_ADDEND = 7


@dataclass(frozen=True, slots=True)
class Sum:
    """
    >>> Sum(3, 4).question, Sum(3, 4).is_solved_by("It is 7.")
    ('What is 3 plus 4?', True)
    """

    left: int
    right: int

    @property
    def answer(self) -> int:
        return self.left + self.right

    @property
    def question(self) -> str:
        return f"What is {self.left} plus {self.right}?"

    def replies(self, answer: int) -> list[str]:
        """The three forms the model has learnt to answer in."""
        return [
            f"The answer is {answer}.",
            f"It is {answer}.",
            f"{self.left} plus {self.right} is {answer}.",
        ]

    def is_solved_by(self, reply: str) -> bool:
        """The last thing said is the right number."""
        found = re.search(r"(\d+)\.?$", reply.strip())
        return found is not None and int(found.group(1)) == self.answer


def random_sum(rng: random.Random) -> Sum:
    return Sum(rng.randint(0, MAX_ADDEND), rng.randint(0, MAX_ADDEND))


def prompt_text(question: str, system: str | None = None) -> str:
    """What the chat template makes of a user message, alone or after a system prompt."""
    before = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{before}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
