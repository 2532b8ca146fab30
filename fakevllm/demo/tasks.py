"""The demo's tasks: every sum of two numbers below eight."""

from __future__ import annotations

from fakevllm_adapters.protocol.swarm import Task

BELOW = 8
"""Exclusive upper bound of both numbers."""


def all_tasks() -> list[Task]:
    """Return one task per pair of numbers below eight. A task's metadata has the right sum."""
    return [
        Task(task_id=f"sum-{a}-{b}", main_query=f"What is {a} plus {b}?", metadata={"sum": a + b})
        for a in range(BELOW)
        for b in range(BELOW)
    ]
