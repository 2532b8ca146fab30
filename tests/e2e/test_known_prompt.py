"""The server asks a real engine process for the known prompt after each publish."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows
from tests.e2e.processes import Processes, wait_until

pytestmark = pytest.mark.slow

READY_TIMEOUT_S = 240.0
CONFIG = "[job]\nbatch_size = 1\nnum_repeat = 4\n"
HOOK = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(sibling.index) for sibling in valid_results]
"""


@pytest.fixture
def processes(tmp_path: Path) -> Generator[Processes]:
    with Processes(tmp_path) as started:
        yield started


@pytest.mark.parametrize(
    "backend",
    ["fake", "embedded", pytest.param("vllm", marks=[pytest.mark.real, pytest.mark.timeout(400)])],
)
def test_an_engine_agrees_with_its_trainer_after_each_publish(
    processes: Processes, tmp_path: Path, backend: str
) -> None:
    model = () if backend == "fake" else ("--model", "demo")
    server = processes.server("--backend", backend, *model)
    (tmp_path / "fakevllm.toml").write_text(CONFIG)
    hooks = write_hooks(tmp_path / "hooks", HOOK)
    config = str(tmp_path / "fakevllm.toml")
    proxy = processes.proxy(server, "--config", config, "--hooks", str(hooks), wait=False)
    proxy.wait_until_healthy(READY_TIMEOUT_S)

    def has_three_steps() -> bool:
        body = {"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 8}
        url = f"{proxy.url}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=60).status_code == 200
        return rows(proxy, "SELECT COUNT(DISTINCT trained_step) FROM groups")[0][0] >= 3

    wait_until(has_three_steps, 120.0, "three steps")
    # Only the first agreement is logged, and each difference.
    (line,) = [line for line in server.log.splitlines() if "known prompt" in line]
    assert " INFO " in line and "version 0: " in line
