"""Names of engines, and how a rollout and a trainer are put together. A new engine is a folder
here and an entry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fakevllm_server.backends.process.child import ChildEngine
from fakevllm_server.backends.process.pair import OneProcess, TwoProcesses, weights_folder
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
"""--backend NAME -> its rollout and its trainer."""


def open_backend(
    rollout: EngineSpec, trainer: EngineSpec, weights_dir: Path | None = None
) -> Backend:
    """Two specs of one engine are one process that does both."""
    if rollout.engine == trainer.engine:
        return OneProcess(ChildEngine(rollout))
    return TwoProcesses(
        ROLLOUTS[rollout.engine](rollout),
        TRAINERS[trainer.engine](trainer),
        weights_folder(rollout.run_dir, weights_dir),
    )
