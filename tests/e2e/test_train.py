"""Tests of `fakevllm train` on the fake engine."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.run_log_reader import read_log_entries, read_step_entries, surviving_steps
from fakevllm import SwarmClient
from fakevllm.train.config import load
from fakevllm.train.step_schedule import step_tasks
from fakevllm.train.training_inputs import load_inputs
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Processes, free_port, wait_until

WAIT_S = 60.0
COMMAND = ("-m", "fakevllm", "train", "--conf", "night.yaml")
AGENT = '''
import asyncio
import itertools
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from fakevllm import SwarmClient, WorkflowOutput

once = iter([ZeroDivisionError("the first one fails")])
cancelled = iter([asyncio.CancelledError()])
turns = Counter()
turning = threading.Lock()
numbers = itertools.count(1)


def turn(task):
    """Return 0 and 1 as the rewards of a task's two episodes, so that each group has a signal."""
    with turning:
        turns[task.task_id] += 1
        return turns[task.task_id] % 2


def ask(task, access):
    with access.openai() as client:
        question = {"role": "user", "content": task.main_query}
        return client.chat.completions.create(model="any", messages=[question])


def run(task, access):
    for error in once:
        raise error
    ask(task, access)
    return WorkflowOutput(reward=float(turn(task)))


async def run_async(task, access):
    for error in cancelled:
        raise error
    async with access.async_openai() as client:
        question = {"role": "user", "content": task.main_query}
        await client.chat.completions.create(model="any", messages=[question])
    return turn(task)


def is_cut_off(task, access):
    ask(task, access)
    if next(numbers) > 11 and not Path("again").exists():
        threading.Event().wait()
    return turn(task)


def is_perfect(task, access):
    ask(task, access)
    return 1


def returns_nothing(task, access):
    ask(task, access)


def kill_server():
    (server,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    os.kill(int(server), signal.SIGKILL)


played = iter(range(1000))
all_begun = threading.Barrier(4, action=kill_server, timeout=30)


def kills(task, access):
    """Kill the server once, after all four episodes of the third step have begun."""
    if next(played) // 4 == 2:
        all_begun.wait()
    ask(task, access)
    return turn(task)


def kills_while_others_claim(task, access):
    """Kill the server once, after the first of the third step's four episodes has begun."""
    if next(played) == 8:
        kill_server()
    ask(task, access)
    return turn(task)


def stops_the_engine(task, access):
    with SwarmClient(access.base_url.partition("/e/")[0]) as client:
        client.stop_engine()
    ask(task, access)
'''
SERVER = "server: {backend: fake, run_dir: run}"


def write(
    folder: Path,
    workflow: str,
    num_steps: int,
    server: str = SERVER,
    more: str = "",
    job_fields: str = "",
) -> None:
    (folder / "agent.py").write_text(AGENT)
    rows = ['{"question": "[[say yes]] %d"}\n' % number for number in range(4)]  # noqa: UP031
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "night.yaml").write_text(
        f"job: {{batch_size: 2, num_repeat: 2, total_training_steps: {num_steps}{job_fields}}}\n"
        f"train: {{workflow: 'agent.py:{workflow}', dataset: rows.jsonl{more}}}\n{server}\n"
    )


def command(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *COMMAND],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_to_end(folder: Path) -> tuple[int, str, str]:
    """Run the command, and return its exit code, output and errors."""
    done = PRELOADED_PYTHON.run(COMMAND, folder, WAIT_S)
    return done.returncode, done.stdout, done.stderr


def test_a_run_trains_to_the_last_step_and_a_second_run_trains_nothing_more(tmp_path: Path) -> None:
    write(tmp_path, "run", 3, more=", eval_dataset: rows.jsonl")
    code, output, errors = run_to_end(tmp_path)
    assert (code, errors.count("Traceback")) == (0, 1)
    assert "ZeroDivisionError: the first one fails" in errors
    assert "step 3 of 3: mean reward 0.50" in output
    assert "Evaluation, 4 tasks:" in output
    steps = read_step_entries(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [[len(group["siblings"]) for group in step["groups"]] for step in steps] == [[2, 2]] * 3
    code, output, _ = run_to_end(tmp_path)
    assert code == 0 and "All 3 steps were trained by earlier runs." in output
    assert len(read_step_entries(tmp_path / "run")) == 3


def test_ctrl_c_saves_a_checkpoint_and_the_same_command_continues_in_the_middle_of_a_step(
    tmp_path: Path,
) -> None:
    port = free_port()
    server = f"server: {{backend: fake, run_dir: run, port: {port}}}"
    write(tmp_path, "is_cut_off", 4, server)
    with command(tmp_path) as process, SwarmClient(f"http://127.0.0.1:{port}") as client:
        wait_until(lambda: len(read_step_entries(tmp_path / "run")) == 2, WAIT_S)
        wait_until(lambda: client.get_rollout_stat().completed_episodes == 3, WAIT_S)
        running = client.get_rollout_stat().running_episode_details or {}
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130 and "Traceback" not in errors
    assert "To continue: fakevllm train --conf night.yaml" in output
    (tmp_path / "again").touch()
    code, output, _ = run_to_end(tmp_path)
    assert code == 0 and "2 steps (of 4; earlier runs trained the rest)" in output
    steps = read_step_entries(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    settings = load(tmp_path / "night.yaml")
    tasks = load_inputs(settings).tasks
    planned = itertools.islice(step_tasks(tasks, settings.job, 0), 4)
    tasks_of_steps = [sorted({task.task_id for task in window}) for window in planned]
    assert [task_ids(step) for step in steps] == tasks_of_steps
    assert [details["optional_task_id"] in tasks_of_steps[2] for details in running.values()] == [
        True
    ]


def test_a_job_that_is_edited_after_a_crash_of_the_machine_takes_effect(tmp_path: Path) -> None:
    write(tmp_path, "is_cut_off", 4)
    with command(tmp_path) as process:
        wait_until(lambda: len(read_step_entries(tmp_path / "run")) == 2, WAIT_S)
        server = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        process.kill()
        os.kill(server, signal.SIGKILL)
    file = tmp_path / "night.yaml"
    file.write_text(file.read_text().replace("num_repeat: 2", "num_repeat: 4"))
    (tmp_path / "again").touch()
    code, output, errors = run_to_end(tmp_path)
    assert code == 0, errors
    assert "step 4 of 4" in output
    steps = surviving_steps(read_log_entries(tmp_path / "run"))
    sizes = [{len(group["siblings"]) for group in step["groups"]} for step in steps]
    assert sizes == [{2}, {2}, {4}, {4}]


def task_ids(step: dict[str, Any]) -> list[str]:
    """Return the ids of the step's tasks, sorted."""
    groups = [group["group_id"] for group in step["groups"]]
    return sorted(group.partition(":")[2].rpartition("#")[0] for group in groups)


@pytest.mark.parametrize("workflow", ["kills", "kills_while_others_claim"])
def test_a_server_that_is_killed_is_restarted_and_every_step_is_made_once(
    tmp_path: Path, workflow: str
) -> None:
    write(tmp_path, workflow, 5)
    code, output, errors = run_to_end(tmp_path)
    assert code == 0, errors
    before, killed, after = output.partition("the server died (exit code -9) and is started again")
    assert killed and "step 2 of 5" in before and "step 5 of 5" in after
    entries = read_log_entries(tmp_path / "run")
    assert [entry["kind"] for entry in entries].count("restored") == 1
    steps = surviving_steps(entries)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert [[len(group["siblings"]) for group in step["groups"]] for step in steps] == [[2, 2]] * 5


def test_a_workflow_without_a_reward_is_reported_in_one_line(tmp_path: Path) -> None:
    write(tmp_path, "returns_nothing", 3)
    code, _, errors = run_to_end(tmp_path)
    assert code == 2 and "Traceback" not in errors
    assert "fakevllm: agent.py:returns_nothing returned None: return the reward" in errors


def test_a_run_ends_when_its_engine_is_stopped(tmp_path: Path) -> None:
    write(tmp_path, "stops_the_engine", 3)
    code, _, errors = run_to_end(tmp_path)
    assert code == 2 and "fakevllm: The engine is off: somebody stopped it" in errors


def test_a_run_ends_with_the_reason_when_no_task_can_be_trained(tmp_path: Path) -> None:
    write(tmp_path, "is_perfect", 3, job_fields=", filter_groups: drop")
    code, output, errors = run_to_end(tmp_path)
    assert code == 2 and "step 0" not in output
    assert (
        "10 batches in a row could not be trained; the last one: no step: 2 groups tied" in errors
    )


def test_flags_that_the_server_refuses_are_reported_with_its_own_error(tmp_path: Path) -> None:
    write(tmp_path, "run", 3, "server: {backend: fake, run_dir: run, flags: [--no-such-flag]}")
    code, _, errors = run_to_end(tmp_path)
    assert code == 2 and "does not stay up (exit code 2)" in errors
    assert "No such option" in errors and errors.count("server.log") == 1


def test_a_server_that_already_runs_is_used_and_left_running(
    tmp_path: Path, processes: Processes
) -> None:
    server = processes.server("--backend", "fake")
    write(tmp_path, "run_async", 2, f"server: {{url: '{server.url}'}}")
    code, output, _ = run_to_end(tmp_path)
    assert code == 0 and "step 2 of 2" in output
    assert len(read_step_entries(tmp_path / "server")) == 2 and server.returncode is None
    status = httpx.get(f"{server.url}/get_engine_status").json()
    assert (status["engine_status"], status["closed"]) == ("ENGINE.ROLLING", "training_finished")
    write(tmp_path, "run_async", 2, f"server: {{url: '{server.url}'}}")
    text = (tmp_path / "night.yaml").read_text().replace("num_repeat: 2", "num_repeat: 3")
    (tmp_path / "night.yaml").write_text(text)
    code, _, errors = run_to_end(tmp_path)
    assert code == 2 and "runs with batch_size 2 and num_repeat 2, not 2 and 3" in errors
