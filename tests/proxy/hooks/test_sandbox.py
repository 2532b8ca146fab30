"""What a hook process sees, may use, and leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fakevllm.cli.main import app
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.results import RewardOutcome
from fakevllm.hooks.sandbox import HookSandbox
from fakevllm.hooks.spec import Sibling, Task
from tests.e2e.processes import wait_until

START_SLEEPER = """
import os, subprocess, time

sleeper = subprocess.Popen(["sleep", "600"])
with open({pid_file!r}, "w") as file:
    file.write(str(sleeper.pid))


def on_compute_relative_reward(valid_results, all_answers):
    {action}
    return [1.0 for _ in all_answers]
"""
RETURN_ENVIRONMENT = """
import asyncio
import os


def on_compute_relative_reward(valid_results, all_answers):
    all_answers[0]["environment"] = sorted(os.environ)
    return [1.0 for _ in all_answers]
"""
ALLOCATE = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(len(bytearray(2**31))) for _ in all_answers]
"""
WRITE_AT_EXIT = """
import atexit
from pathlib import Path

atexit.register(Path({file!r}).write_text, "ran")


def on_compute_relative_reward(valid_results, all_answers):
    return [1.0 for _ in all_answers]
"""
RUN_UNTIL_KILLED = """
import asyncio, sys
from pathlib import Path
from fakevllm.hooks.hook_runner import HookWorker


async def main():
    await HookWorker(Path(sys.argv[1]), 60).start()
    await asyncio.Event().wait()


asyncio.run(main())
"""


def sibling() -> list[Sibling]:
    return [Sibling(0, Task(), "g/0", "stop")]


def hook(folder: Path, text: str) -> Path:
    (folder / "on_compute_relative_reward.py").write_text(text)
    return folder


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def reward(worker: HookWorker) -> RewardOutcome:
    return await worker.reward(sibling(), [{"content": "x"}], "question")


async def test_hooks_see_harmless_and_named_variables_and_no_key_of_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FAKEVLLM_SWARM_KEY", "FAKEVLLM_FALLBACK_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    for name in ("FAKEVLLM_JUDGE_KEY", "DATABASE_URL", "HTTPS_PROXY", "LC_ALL"):
        monkeypatch.setenv(name, "C")
    worker = HookWorker(hook(tmp_path, RETURN_ENVIRONMENT), 20, HookSandbox(("DATABASE_URL",)))
    await worker.start()
    seen = set((await reward(worker)).annotations[0]["environment"])
    await worker.close()
    assert {"PATH", "FAKEVLLM_JUDGE_KEY", "DATABASE_URL", "HTTPS_PROXY", "LC_ALL"} <= seen
    assert not seen & {"FAKEVLLM_SWARM_KEY", "FAKEVLLM_FALLBACK_KEY", "AWS_SECRET_ACCESS_KEY"}


async def test_a_hook_beyond_its_memory_limit_fails_and_the_next_call_works(
    tmp_path: Path,
) -> None:
    worker = HookWorker(hook(tmp_path, ALLOCATE), 20, HookSandbox(memory_mb=1500))
    await worker.start()
    outcome = await reward(worker)
    again = await reward(worker)
    await worker.close()
    assert outcome.rewards is None and "MemoryError" in (outcome.reason or "")
    assert again.reason == outcome.reason


@pytest.mark.parametrize(
    "action", ["time.sleep(60)", "os._exit(3)", "pass"], ids=["timeout", "crash", "close"]
)
async def test_what_a_hook_has_started_ends_with_the_hook_process(
    tmp_path: Path, action: str
) -> None:
    pid_file = tmp_path / "pid"
    text = START_SLEEPER.format(pid_file=str(pid_file), action=action)
    worker = HookWorker(hook(tmp_path, text), 0.5)
    await worker.start()
    pid = int(pid_file.read_text())
    assert is_running(pid)
    await reward(worker)
    await worker.close()
    wait_until(lambda: not is_running(pid), 10, "the end of the process that the hook started")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_what_a_hook_has_started_ends_with_a_proxy_that_is_killed(
    tmp_path: Path, number: signal.Signals
) -> None:
    pid_file = tmp_path / "pid"
    folder = tmp_path / "hooks"
    folder.mkdir()
    hook(folder, START_SLEEPER.format(pid_file=str(pid_file), action="pass"))
    parent = subprocess.Popen([sys.executable, "-c", RUN_UNTIL_KILLED, str(folder)])
    wait_until(
        lambda: pid_file.exists() and pid_file.read_text() != "", 30, "the hook to be loaded"
    )
    pid = int(pid_file.read_text())
    os.kill(parent.pid, number)
    parent.wait(10)
    wait_until(lambda: not is_running(pid), 10, "the end of the process that the hook started")


async def test_check_hook_runs_the_hook_with_the_environment_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "C")
    hook(tmp_path, "import os\nos.environ['DATABASE_URL']\n" + RETURN_ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fakevllm.toml").write_text('[hooks]\nenvironment = ["DATABASE_URL"]\n')
    result = await asyncio.to_thread(CliRunner().invoke, app, ["check-hook", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (tmp_path / "fakevllm.toml").unlink()
    refused = await asyncio.to_thread(CliRunner().invoke, app, ["check-hook", str(tmp_path)])
    assert refused.exit_code == 2 and "DATABASE_URL" in refused.output


async def test_exit_handlers_of_hooks_run_when_the_proxy_stops(tmp_path: Path) -> None:
    file = tmp_path / "exit"
    worker = HookWorker(hook(tmp_path, WRITE_AT_EXIT.format(file=str(file))), 20)
    await worker.start()
    await worker.close()
    assert file.read_text() == "ran"
