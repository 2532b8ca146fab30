"""The task of the command `fakevllm demo`: questions about sums of two small numbers, and the check
of the replies. This module does not import torch."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

MAX_ADDEND = 7


@dataclass(frozen=True, slots=True)
class Sum:
    """A question about the sum of two numbers.

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
        """Return three replies that state `answer`, in the three forms in which the demo's model
        answers."""
        return [
            f"The answer is {answer}.",
            f"It is {answer}.",
            f"{self.left} plus {self.right} is {answer}.",
        ]

    def is_solved_by(self, reply: str) -> bool:
        """Return True if the reply ends with the right sum."""
        match = re.search(r"(\d+)\.?$", reply.strip())
        return match is not None and int(match.group(1)) == self.answer


def random_sum(rng: random.Random) -> Sum:
    return Sum(rng.randint(0, MAX_ADDEND), rng.randint(0, MAX_ADDEND))


def prompt_text(question: str, system: str | None = None) -> str:
    """Return the prompt text for one user message, with the markup of the model's chat template. If
    `system` is given, the prompt begins with a system message."""
    before = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{before}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
