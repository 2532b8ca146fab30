"""The demo's tasks: all sums of two numbers from 0 to 7.

In the demo's mode `gated`, versions are evaluated on held-out tasks. This mode holds out a quarter
of the sums, and never trains them.
"""

from __future__ import annotations

import json

from fakevllm_adapters.protocol.swarm import Task

BELOW = 8
"""Both numbers of a sum are smaller than this number."""
HELD_OUT_ADDENDS = (2, 5)
"""A sum is held out if its second number is one of these numbers."""


def all_tasks() -> list[Task]:
    """Return one task for each pair of numbers from 0 to 7. A task's metadata has the right sum."""
    return [_task(a, b) for a in range(BELOW) for b in range(BELOW)]


def training_tasks() -> list[Task]:
    """Return the tasks that are not held out."""
    return [_task(a, b) for a in range(BELOW) for b in range(BELOW) if b not in HELD_OUT_ADDENDS]


def held_out_rows() -> str:
    """Return the held-out tasks as JSON Lines. Each task asks for the sum of two numbers."""
    rows = (
        {"question": _question(a, b), "sum": a + b} for a in range(BELOW) for b in HELD_OUT_ADDENDS
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def _task(a: int, b: int) -> Task:
    return Task(task_id=f"sum-{a}-{b}", main_query=_question(a, b), metadata={"sum": a + b})


def _question(a: int, b: int) -> str:
    return f"What is {a} plus {b}?"
