"""A backend in the server's process whose weights are the list of calls that trained them.

A checkpoint therefore shows what was trained, how often, and in which order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from swarm_server.local_backend import LocalBackend

from fakevllm_server.types.backend import ActionFailed, BackendStart, Batch, LossSpec, StepMetrics

POISON = "poison"
"""Name of a group with which every training step fails."""
FAR = "far"
"""Prefix of the names of groups whose sampler is too far from the weights.

A step with such a group makes no update."""
LINEAGE = "lineage.json"

Lineage = list[tuple[int, list[tuple[str, int]]]]
"""For each step, the group and the mark of each call that was trained."""


class LineageBackend(LocalBackend):
    def __init__(self) -> None:
        super().__init__()
        self.lineage: Lineage = []

    async def start(self) -> BackendStart:
        started = await super().start()
        if started.trainer_is_new:
            self.lineage = []
        return started

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        names = {call.group_id for call in batch.calls}
        if POISON in names:
            raise ActionFailed("the group is poisoned")
        metrics = await super().step(batch, loss)
        if any(name.startswith(FAR) for name in names):
            return metrics | {"too_far": 1.0, "no_update": 1.0, "skipped": 1.0, "mismatch_k3": 5.0}
        self.lineage.append(
            (batch.step, [(call.group_id, mark_of(call.prompt_ids)) for call in batch.calls])
        )
        return metrics

    async def save(self, folder: Path) -> None:
        await super().save(folder)
        (folder / LINEAGE).write_text(json.dumps(self.lineage))

    async def restore(self, folder: Path) -> None:
        await super().restore(folder)
        self.lineage = read_lineage(folder)


def read_lineage(folder: Path) -> Lineage:
    lineage = json.loads((folder / LINEAGE).read_text())
    return [(step, [(name, mark) for name, mark in calls]) for step, calls in lineage]


def mark_of(prompt_ids: Sequence[int]) -> int:
    """Return the last prompt token, which identifies the captured call."""
    return prompt_ids[-1]
