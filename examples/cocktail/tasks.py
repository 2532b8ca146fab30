"""Three kinds of tasks for one model, and how much of each batch each may be."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from fakevllm import TrainJob

BATCH_SIZE, NUM_REPEAT = 10, 4


def job(num_repeat: int = NUM_REPEAT) -> TrainJob:
    return TrainJob(batch_size=BATCH_SIZE, num_repeat=num_repeat, lr=3e-4, ppo_epochs=2)


@dataclass(frozen=True, slots=True)
class Mix:
    share: float
    system: str
    """Tells the model which of the three it is."""
    num_turns: int
    pause_s: float
    """Between two turns: the agent's own work."""
    score: Callable[[str, int], float]
    """Of one reply; the sum is what would be right."""


def _right_sum(reply: str, answer: int) -> float:
    return float(re.findall(r"\d+", reply)[-1:] == [str(answer)])


def _few_words(reply: str, answer: int) -> float:
    return float(len(reply.split()) <= 3)


def _whole_sentence(reply: str, answer: int) -> float:
    return float(re.fullmatch(r"The answer is \d+\.", reply) is not None)


MIXES = {
    "math": Mix(0.4, "You are a math tutor.", 1, 0.0, _right_sum),
    "words": Mix(0.3, "Be brief and polite.", 2, 0.02, _few_words),
    "format": Mix(0.3, "Answer the question.", 4, 0.1, _whole_sentence),
}


def sums(task_id: str, number: int) -> list[tuple[str, int]]:
    """Questions and answers. Every episode of a task asks the same."""
    chance = random.Random(task_id)
    pairs = [(chance.randrange(8), chance.randrange(8)) for _ in range(number)]
    return [(f"What is {left} plus {right}?", left + right) for left, right in pairs]
