"""The hook `run_command` rewards the answers that a command accepts."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from fakevllm.hooks.spec import Json, Sibling, Task
from reward_hooks import run_command
from tests.proxy.scripted_swarm import until

ACCEPTS_REFERENCE = """
import json, sys
request = json.load(sys.stdin)
assert request["question"] == "6*7?"
sys.exit(0 if request["answer"] == request["metadata"]["answer"] else 3)
"""


async def rewards(code: str, answers: list[Json], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(run_command, "COMMAND", (sys.executable, "-c", code))
    task = Task(metadata={"answer": "42"})
    siblings = [Sibling(i, task, f"g/{i}", "stop") for i in range(len(answers))]
    return await run_command.on_compute_relative_reward(siblings, answers, "6*7?")


def answer(text: str, finish_reason: str = "stop") -> Json:
    return {"content": text, "finish_reason": finish_reason}


async def test_an_answer_is_rewarded_if_the_command_accepts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [answer("42"), answer("41"), answer("42", "length")]
    assert await rewards(ACCEPTS_REFERENCE, answers, monkeypatch) == [1.0, 0.0, 0.0]
    assert [one.get("exit_code") for one in answers] == [0, 3, None]


async def test_a_command_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_command, "TIMEOUT_S", 0.3)
    started = time.monotonic()
    assert await rewards("import time; time.sleep(60)", [answer("42")], monkeypatch) == [0.0]
    assert time.monotonic() - started < 20


async def test_the_children_of_a_command_that_does_not_end_are_killed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_command, "TIMEOUT_S", 3.0)
    file = tmp_path / "pid"
    code = f"""
import pathlib, subprocess
child = subprocess.Popen(["sh", "-c", "sleep 61 & echo $!; wait"], stdout=subprocess.PIPE)
pathlib.Path({str(file)!r}).write_bytes(child.stdout.readline())
child.wait()
"""
    started = time.monotonic()
    # The request does not fit into the pipe, which the child keeps open.
    assert await rewards(code, [answer("x" * 1_000_000)], monkeypatch) == [0.0]
    assert time.monotonic() - started < 20
    pid = int(file.read_text())
    await until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_command_that_reads_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await rewards("", [answer("x" * 1_000_000)], monkeypatch) == [1.0]


async def test_a_command_that_cannot_be_started_fails_the_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_command, "COMMAND", ("/nowhere/command",))
    task = Task(metadata={"answer": "42"})
    with pytest.raises(FileNotFoundError):
        await run_command.on_compute_relative_reward(
            [Sibling(0, task, "g/0", "stop")], [answer("42")], "6*7?"
        )
