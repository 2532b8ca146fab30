"""Run a module in several processes, each of which is one rank."""

from __future__ import annotations

import os
import subprocess
import sys

from fakevllm_server.backends.verl.__main__ import workers_environment
from tests.e2e.processes import free_port

TIMEOUT_S = 200


def run_ranks(num_ranks: int, module: str, *arguments: str) -> str:
    """Run the module, and return what the first rank has printed."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WG_BACKEND": "ray",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": str(num_ranks),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    env = os.environ | workers_environment(is_cpu=True, is_private=True) | shared
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=env | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), outputs[0][1] + outputs[-1][1]
    return outputs[0][0]
