"""The server asks an engine for the known prompt after each publish.

Here it asks the fake engine. `check_agreement` is also used by tests that train for other reasons,
with the embedded engine (test_arms) and with vLLM (test_real_engines).
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows
from tests.e2e.processes import Process, Processes, wait_until

pytestmark = pytest.mark.slow

CONFIG = "[job]\nbatch_size = 1\nnum_repeat = 4\n"
HOOK = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(sibling.index) for sibling in valid_results]
"""


def check_agreement(server: Process) -> None:
    """Check in the server's log that the engine agreed with its trainer after each publish. The
    server logs each difference, but only the first agreement."""
    (line,) = [line for line in server.log.splitlines() if "known prompt" in line]
    assert " INFO " in line and "version 0: " in line


def test_an_engine_agrees_with_its_trainer_after_each_publish(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    (tmp_path / "fakevllm.toml").write_text(CONFIG)
    hooks = write_hooks(tmp_path / "hooks", HOOK)
    config = str(tmp_path / "fakevllm.toml")
    proxy = processes.proxy(server, "--config", config, "--hooks", str(hooks))

    def has_three_steps() -> bool:
        body = {"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 8}
        url = f"{proxy.url}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=60).status_code == 200
        return rows(proxy, "SELECT COUNT(DISTINCT trained_step) FROM groups")[0][0] >= 3

    wait_until(has_three_steps, 120.0, "three steps")
    check_agreement(server)
