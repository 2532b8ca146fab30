"""One rank of the verl trainer, with a pass that fails in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fakevllm_server.backends.verl.__main__ import workers_environment
from tests.e2e.processes import free_port

pytestmark = [pytest.mark.real]

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize("layer", ["lm_head", "model.layers.1.mlp"])
def test_a_reference_pass_that_fails_leaves_the_trained_weights_as_they_were(layer: str) -> None:
    """The pass fails while some layers are gathered. With one rank, gathered parameters have the
    same shape as shards, so no other error can reveal the mistake."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WG_BACKEND": "ray"}
    env = os.environ | workers_environment(is_cpu=True, is_private=True) | ONE_RANK | rendezvous
    result = subprocess.run(
        [sys.executable, "-m", "swarm_server.backends.verl.failing_pass", layer],
        env=env | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode == 0, result.stderr
    trained, has_failed, change, changed = json.loads(result.stdout.splitlines()[-1])
    assert len(trained) > 30 and has_failed
    assert change == 0 and changed == []
