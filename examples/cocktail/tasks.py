"""The three kinds of tasks, with the share of each batch that each kind may fill."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from fakevllm import TrainJob

BATCH_SIZE, NUM_REPEAT = 10, 4


def create_job(num_repeat: int = NUM_REPEAT) -> TrainJob:
    """Create the training job that all three clients send."""
    return TrainJob(batch_size=BATCH_SIZE, num_repeat=num_repeat, lr=3e-4, ppo_epochs=2)


@dataclass(frozen=True, slots=True)
class Mix:
    """One kind of task."""

    share: float
    """Fraction of the batch."""
    system: str
    """System prompt, from which the model recognizes the kind."""
    num_turns: int
    pause_s: float
    """Seconds between two turns. The pause takes the place of an agent's own work."""
    score: Callable[[str, int], float]
    """Function of (reply, right sum) that returns the reward of one reply."""


def _is_right(reply: str, answer: int) -> float:
    return float(re.findall(r"\d+", reply)[-1:] == [str(answer)])


def _is_brief(reply: str, answer: int) -> float:
    return float(len(reply.split()) <= 3)


def _is_sentence(reply: str, answer: int) -> float:
    return float(re.fullmatch(r"The answer is \d+\.", reply) is not None)


MIXES = {
    "math": Mix(0.4, "You are a math tutor.", 1, 0.0, _is_right),
    "words": Mix(0.3, "Be brief and polite.", 2, 0.02, _is_brief),
    "format": Mix(0.3, "Answer the question.", 4, 0.1, _is_sentence),
}


def sums(task_id: str, number: int) -> list[tuple[str, int]]:
    """Return `number` questions with their answers. Every episode of a task gets the same
    questions."""
    rng = random.Random(task_id)
    pairs = [(rng.randrange(8), rng.randrange(8)) for _ in range(number)]
    return [(f"What is {left} plus {right}?", left + right) for left, right in pairs]
