"""`fakevllm-server` whose rollout engine and trainer are two fake engines, each a process of its
own: the pairs that users have need vLLM."""

from __future__ import annotations

from pathlib import Path

from fakevllm_server import cli, swarm
from fakevllm_server.backends.base import Backend
from fakevllm_server.backends.child import ChildEngine
from fakevllm_server.backends.pair import TwoProcesses, weights_folder
from fakevllm_server.backends.spec import EngineSpec


def open_pair(rollout: EngineSpec, trainer: EngineSpec, weights_dir: Path | None = None) -> Backend:
    folder = weights_folder(rollout.run_dir, weights_dir)
    return TwoProcesses(ChildEngine(rollout), ChildEngine(trainer), folder)


if __name__ == "__main__":
    swarm.open_backend = open_pair
    cli.main()
