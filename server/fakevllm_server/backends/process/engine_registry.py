"""Tables of the rollout engines and the trainers by name. A further table has the pair (rollout
engine, trainer) for each value of the flag `--backend`.

To add an engine, add a folder in `backends/` and an entry in these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.backends.process.rollout_trainer_pairs import (
    OneProcess,
    TwoProcesses,
    weights_folder,
)
from fakevllm_server.backends.vllm.rollout import VllmRollout
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
    rollout: EngineSpec, trainer: EngineSpec, weights_dir: Path | None = None
) -> Backend:
    """Return the backend for a rollout engine and a trainer. If both specs name the same engine,
    one process samples and trains. Otherwise there are two processes.

    If there are two processes, new weights pass between them by the weight transport that the spec
    of the rollout engine names. If they pass through a folder, it is in `weights_dir`. If
    `weights_dir` is None, the folder is in memory.
    """
    if rollout.engine == trainer.engine:
        return OneProcess(ChildEngine(rollout))
    return TwoProcesses(
        ROLLOUTS[rollout.engine](rollout),
        TRAINERS[trainer.engine](trainer),
        weights_folder(rollout.run_dir, weights_dir),
        transport=rollout.weight_transport,
        sleeps=rollout.sleeps,
    )
