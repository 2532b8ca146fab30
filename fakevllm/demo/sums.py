"""The demo's users: endlessly asking what a plus b is."""

from __future__ import annotations

from fakevllm_adapters.protocol.swarm import Task

BELOW = 8
"""Both numbers are smaller."""


def all_tasks() -> list[Task]:
    return [
        Task(task_id=f"sum-{a}-{b}", main_query=f"What is {a} plus {b}?", metadata={"sum": a + b})
        for a in range(BELOW)
        for b in range(BELOW)
    ]
