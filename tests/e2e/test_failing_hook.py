"""A test of the log lines about a hook that fails."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import wait_for_groups
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Processes
from tests.e2e.test_trouble import ask

REWARD = "def on_compute_relative_reward(results, answers):\n    "
GOOD = f"{REWARD}return [1.0] * len(answers)\n"
SUBMIT = "def on_user_submit_new_requests(request_id, task):\n    "
RAISED = "hook_raised: ValueError: "


@pytest.mark.parametrize(
    ("source", "hook", "reason", "num_tracebacks"),
    [
        (f"{REWARD}raise ValueError(len(answers))", "on_compute_relative_reward", RAISED, 1),
        (f"{REWARD}return [1.0]", "on_compute_relative_reward", "hook_length: got 1, want 3", 0),
        (f"{GOOD}{SUBMIT}raise ValueError(request_id)", "on_user_submit_new_requests", RAISED, 1),
        (f"{GOOD}{SUBMIT}return 0", "on_user_submit_new_requests", "hook_value: got 0", 0),
    ],
)
def test_the_log_reports_a_failing_hook_once_with_the_command_to_check_it(
    processes: Processes, source: str, hook: str, reason: str, num_tracebacks: int
) -> None:
    hooks = write_hooks(processes.folder / "hooks", source)
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(hooks), "--n", "3")
    for _ in range(3):
        ask(proxy)
    wait_for_groups(proxy, 3)
    (line,) = (line for line in proxy.log.splitlines() if f"{hook} failed" in line)
    counted = httpx.get(f"{proxy.url}/fakevllm/stats").json()["hook_failures"]
    assert (counted["num_failed"], counted["num_groups"]) == (3, 3)
    assert counted["reason"].startswith(reason.removesuffix(": "))
    assert "WARNING" in line and f"({reason}" in line
    assert proxy.log.count("Traceback") == num_tracebacks
    command = line.partition("to see why: ")[2].split()
    checked = PRELOADED_PYTHON.run(["-m", *command], processes.folder)
    assert checked.returncode == 1 and f"{hook} failed" in checked.stdout


def test_a_replay_ends_with_what_a_failing_hook_kept_from_training(processes: Processes) -> None:
    hooks = write_hooks(processes.folder / "hooks", f"{REWARD}raise KeyError(len(answers))")
    proxy = processes.proxy(processes.server("--backend", "fake"), "--hooks", str(hooks))
    dataset = processes.folder / "rows.jsonl"
    dataset.write_text('{"question": "one"}\n{"question": "two"}\n{"question": "three"}\n')
    replay = ["-m", "fakevllm", "replay", "--dataset", str(dataset), "--concurrency", "1"]
    done = PRELOADED_PYTHON.run([*replay, "--url", f"{proxy.url}/v1"], processes.folder)
    # The last group may end after the replay.
    assert done.returncode == 0
    assert re.search(r"because a hook failed: [23] of the latest [23] groups \(", done.stderr)
    assert "hook_raised: KeyError" in done.stderr
