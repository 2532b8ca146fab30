"""Tables of the rollout engines and the trainers by name. A further table has the pair (rollout
engine, trainer) for each value of the flag `--backend`.

To add an engine, add a folder in `backends/` and an entry in these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.backends.process.rollout_trainer_pairs import (
    OneProcess,
    TwoProcesses,
    kept_weights_folder,
    weights_folder,
)
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.fleet.rollout import FleetRollout
from fakevllm_server.types.backend import Backend, Rollout, Trainer
from fakevllm_server.types.engine_spec import EngineSpec

ROLLOUTS: dict[str, Callable[[EngineSpec], Rollout]] = {
    "fake": ChildEngine,
    "embedded": ChildEngine,
    "vllm": VllmRollout,
}
TRAINERS: dict[str, Callable[[EngineSpec], Trainer]] = {
    "fake": ChildEngine,
    "embedded": ChildEngine,
    "verl": ChildEngine,
}
PAIRS = {
    "fake": ("fake", "fake"),
    "embedded": ("embedded", "embedded"),
    "vllm": ("vllm", "embedded"),
    "verl": ("vllm", "verl"),
}
"""The names of the rollout engine and the trainer, by the value of `--backend`."""


def open_backend(
    replicas: Sequence[EngineSpec], trainer: EngineSpec, weights_dir: Path | None = None
) -> Backend:
    """Return the backend for some rollout replicas and a trainer. If there is one replica, and both
    specs name the same engine, one process samples and trains. Otherwise each replica and the
    trainer are processes of their own.

    New weights then pass between them by the weight transport that the spec of the first replica
    names. If they pass through a folder, it is in `weights_dir`. If `weights_dir` is None, the
    folder is in memory.
    """
    first = replicas[0]
    if len(replicas) == 1 and first.engine == trainer.engine:
        return OneProcess(ChildEngine(first))
    folder = weights_folder(trainer.run_dir, weights_dir)
    rollout = _open_rollout(replicas, trainer, folder)
    return TwoProcesses(
        rollout,
        TRAINERS[trainer.engine](trainer),
        folder,
        transport=first.weight_transport,
        sleeps=first.sleeps,
    )


def _open_rollout(replicas: Sequence[EngineSpec], trainer: EngineSpec, folder: Path) -> Rollout:
    """Return the only replica, or the fleet of all replicas. `folder` is the folder for new
    weights. The fleet's copy of the current weights is beside it."""
    rollouts = {
        f"replica-{number}": ROLLOUTS[spec.engine](spec) for number, spec in enumerate(replicas)
    }
    if len(rollouts) == 1:
        return rollouts["replica-0"]
    # Only a trainer of the same engine renormalizes over the allowed token sets.
    uses_allowed = replicas[0].engine == trainer.engine
    return FleetRollout(rollouts, kept_weights_folder(folder), uses_allowed=uses_allowed)
