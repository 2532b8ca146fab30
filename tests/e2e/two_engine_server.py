"""`fakevllm-server` with two fake engines, a rollout engine and a trainer, in separate processes.

In production, the rollout engine of such a pair is vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.backends.process.rollout_trainer_pairs import TwoProcesses, weights_folder
from fakevllm_server.cli import main
from fakevllm_server.types.backend import Backend
from fakevllm_server.types.engine_spec import EngineSpec
from fakevllm_server.web import server_state


def open_pair(
    replicas: Sequence[EngineSpec], trainer: EngineSpec, weights_dir: Path | None = None
) -> Backend:
    (rollout,) = replicas
    folder = weights_folder(rollout.run_dir, weights_dir)
    return TwoProcesses(ChildEngine(rollout), ChildEngine(trainer), folder)


if __name__ == "__main__":
    server_state.open_backend = open_pair
    main.main()
