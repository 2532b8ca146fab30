"""A backend in this process whose weights are the list of what trained them, so that anybody can
read off a checkpoint what was trained, how often and in which order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from swarm_server.local_backend import LocalBackend

from fakevllm_server.types.backend import ActionFailed, BackendStart, Batch, LossSpec, StepMetrics

POISON = "poison"
"""A group of this name fails every step it is in."""
FAR = "far"
"""A group whose name begins so is too far from the engine: its step makes no update."""
LINEAGE = "lineage.json"

Lineage = list[tuple[int, list[tuple[str, int]]]]
"""Step and, for each call it was trained on, its group and its mark."""


class LedgerBackend(LocalBackend):
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
            raise ActionFailed("a group no trainer takes")
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
        self.lineage = lineage_of(folder)


def lineage_of(folder: Path) -> Lineage:
    read = json.loads((folder / LINEAGE).read_text())
    return [(step, [(name, mark) for name, mark in calls]) for step, calls in read]


def mark_of(prompt_ids: Sequence[int]) -> int:
    """Its last token tells one captured call from all others."""
    return prompt_ids[-1]
