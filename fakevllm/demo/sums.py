"""The demo's users: endlessly asking what a plus b is."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from fakevllm_adapters.swarm import Task

BELOW = 8
"""Both numbers are smaller."""


def all_tasks() -> list[Task]:
    return [
        Task(task_id=f"sum-{a}-{b}", main_query=f"What is {a} plus {b}?", metadata={"sum": a + b})
        for a in range(BELOW)
        for b in range(BELOW)
    ]


def endless_rows(tasks: Sequence[Task], seed: int, skip: int = 0) -> Iterator[tuple[int, Task]]:
    """(round, task), the tasks shuffled anew in each round; `skip` rows were played before."""
    round_, played = 0, 0
    while True:
        order = list(tasks)
        random.Random(f"{seed} {round_}").shuffle(order)
        for task in order:
            if played >= skip:
                yield round_, task
            played += 1
        round_ += 1
