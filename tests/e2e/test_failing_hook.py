"""A reward hook that fails is seen in the proxy's log, with what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import wait_for_groups
from tests.e2e.processes import Processes
from tests.e2e.test_trouble import ask


@pytest.mark.parametrize(
    ("reward", "reason", "num_tracebacks"),
    [
        ("raise ValueError(len(answers[0]['content']))", "hook_raised: ValueError: ", 1),
        ("return [1.0]", "hook_length: got 1, want 3", 0),
    ],
)
def test_the_log_says_once_that_a_hook_fails_and_what_to_do(
    processes: Processes, reward: str, reason: str, num_tracebacks: int
) -> None:
    source = f"def on_compute_relative_reward(results, answers):\n    {reward}\n"
    hooks = write_hooks(processes.folder / "hooks", source)
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(hooks), "--n", "3")
    for _ in range(3):
        ask(proxy)
    wait_for_groups(proxy, 3)
    (line,) = (one for one in proxy.log.splitlines() if "the reward hook failed" in one)
    assert "WARNING" in line and f"({reason}" in line
    assert proxy.log.count("Traceback") == num_tracebacks
    command = line.partition("to see why: ")[2].split()
    checked = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=50
    )
    assert checked.returncode == 1 and "on_compute_relative_reward failed" in checked.stdout
