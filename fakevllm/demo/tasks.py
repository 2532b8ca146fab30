"""The demo's tasks: all sums of two numbers from 0 to 7."""

from __future__ import annotations

from fakevllm_adapters.protocol.swarm import Task

BELOW = 8
"""Both numbers of a sum are smaller than this number."""


def all_tasks() -> list[Task]:
    """Return one task for each pair of numbers from 0 to 7. A task's metadata has the right sum."""
    return [
        Task(task_id=f"sum-{a}-{b}", main_query=f"What is {a} plus {b}?", metadata={"sum": a + b})
        for a in range(BELOW)
        for b in range(BELOW)
    ]
