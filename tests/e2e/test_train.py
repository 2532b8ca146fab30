"""`fakevllm train`: one command from a file to the last step, on the fake engine."""

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
from fakevllm.train.inputs import load_inputs
from fakevllm.train.plan import step_tasks
from tests.e2e.processes import Processes, free_port, wait_until

WAIT_S = 60.0
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
    """0 and 1 in each task's two episodes, so that every group has a signal."""
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


def forgets(task, access):
    ask(task, access)


def kill_server():
    (server,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    os.kill(int(server), signal.SIGKILL)


played = iter(range(1000))
all_begun = threading.Barrier(4, action=kill_server, timeout=30)


def kills(task, access):
    """The server, once, while the third step's four episodes are played."""
    if next(played) // 4 == 2:
        all_begun.wait()
    ask(task, access)
    return turn(task)


def kills_while_others_claim(task, access):
    """The same, as the first of the four has begun."""
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
    of_job: str = "",
) -> None:
    (folder / "agent.py").write_text(AGENT)
    rows = ['{"question": "[[say yes]] %d"}\n' % number for number in range(4)]  # noqa: UP031
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "night.yaml").write_text(
        f"job: {{batch_size: 2, num_repeat: 2, total_training_steps: {num_steps}{of_job}}}\n"
        f"train: {{workflow: 'agent.py:{workflow}', dataset: rows.jsonl{more}}}\n{server}\n"
    )


def command(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fakevllm", "train", "--conf", "night.yaml"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(folder: Path) -> tuple[int, str, str]:
    """Exit code, what it said, and what it complained of."""
    with command(folder) as process:
        try:
            said, complained = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    return process.returncode, said, complained


def test_it_trains_to_the_last_step_and_a_second_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    write(tmp_path, "run", 3, more=", eval_dataset: rows.jsonl")
    code, said, complained = finished(tmp_path)
    assert (code, complained.count("Traceback")) == (0, 1)
    assert "ZeroDivisionError: the first one fails" in complained
    assert "step 3 of 3: mean reward 0.50" in said
    assert "Evaluation, 4 tasks:" in said
    steps = read_step_entries(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [[len(group["siblings"]) for group in step["groups"]] for step in steps] == [[2, 2]] * 3
    code, said, _ = finished(tmp_path)
    assert code == 0 and "All 3 steps were trained by earlier runs." in said
    assert len(read_step_entries(tmp_path / "run")) == 3


def test_ctrl_c_saves_and_the_same_command_goes_on_in_the_middle_of_a_step(tmp_path: Path) -> None:
    port = free_port()
    server = f"server: {{backend: fake, run_dir: run, port: {port}}}"
    write(tmp_path, "is_cut_off", 4, server)
    with command(tmp_path) as process, SwarmClient(f"http://127.0.0.1:{port}") as client:
        wait_until(lambda: len(read_step_entries(tmp_path / "run")) == 2, WAIT_S)
        wait_until(lambda: client.get_rollout_stat().completed_episodes == 3, WAIT_S)
        running = client.get_rollout_stat().running_episode_details or {}
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130 and "Traceback" not in complained
    assert "To continue: fakevllm train --conf night.yaml" in said
    (tmp_path / "again").touch()
    code, said, _ = finished(tmp_path)
    assert code == 0 and "2 steps (of 4; earlier runs trained the rest)" in said
    steps = read_step_entries(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    settings = load(tmp_path / "night.yaml")
    tasks = load_inputs(settings).tasks
    planned = itertools.islice(step_tasks(tasks, settings.job, 0), 4)
    tasks_of_steps = [sorted({task.task_id for task in one}) for one in planned]
    assert [names(step) for step in steps] == tasks_of_steps
    assert [one["optional_task_id"] in tasks_of_steps[2] for one in running.values()] == [True]


def test_a_file_that_is_edited_after_a_crash_of_the_machine_holds(tmp_path: Path) -> None:
    write(tmp_path, "is_cut_off", 4)
    with command(tmp_path) as process:
        wait_until(lambda: len(read_step_entries(tmp_path / "run")) == 2, WAIT_S)
        server = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        process.kill()
        os.kill(server, signal.SIGKILL)
    file = tmp_path / "night.yaml"
    file.write_text(file.read_text().replace("num_repeat: 2", "num_repeat: 4"))
    (tmp_path / "again").touch()
    code, said, complained = finished(tmp_path)
    assert code == 0, complained
    assert "step 4 of 4" in said
    steps = surviving_steps(read_log_entries(tmp_path / "run"))
    sizes = [{len(group["siblings"]) for group in step["groups"]} for step in steps]
    assert sizes == [{2}, {2}, {4}, {4}]


def names(step: dict[str, Any]) -> list[str]:
    """Of its tasks."""
    groups = [group["group_id"] for group in step["groups"]]
    return sorted(group.partition(":")[2].rpartition("#")[0] for group in groups)


@pytest.mark.parametrize("workflow", ["kills", "kills_while_others_claim"])
def test_a_server_that_is_killed_is_started_again_and_every_step_is_made_once(
    tmp_path: Path, workflow: str
) -> None:
    write(tmp_path, workflow, 5)
    code, said, complained = finished(tmp_path)
    assert code == 0, complained
    before, killed, after = said.partition("the server died (exit code -9) and was started again")
    assert killed and "step 2 of 5" in before and "step 5 of 5" in after
    entries = read_log_entries(tmp_path / "run")
    assert [entry["kind"] for entry in entries].count("restored") == 1
    steps = surviving_steps(entries)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert [[len(group["siblings"]) for group in step["groups"]] for step in steps] == [[2, 2]] * 5


def test_a_workflow_that_returns_nothing_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, "forgets", 3)
    code, _, complained = finished(tmp_path)
    assert code == 2 and "Traceback" not in complained
    assert "fakevllm: agent.py:forgets returned None: return the reward" in complained


def test_an_engine_that_goes_off_in_the_middle_of_a_step_ends_it(tmp_path: Path) -> None:
    write(tmp_path, "stops_the_engine", 3)
    code, _, complained = finished(tmp_path)
    assert code == 2 and "fakevllm: The engine is off: somebody stopped it" in complained


def test_tasks_of_which_nothing_can_be_trained_end_it_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path, "is_perfect", 3, of_job=", filter_groups: drop")
    code, said, complained = finished(tmp_path)
    assert code == 2 and "step 0" not in said
    assert (
        "10 batches in a row could not be trained; the last one: no step: 2 groups tied"
        in complained
    )


def test_a_server_that_refuses_its_flags_is_one_line_with_its_own_words(tmp_path: Path) -> None:
    write(tmp_path, "run", 3, "server: {backend: fake, run_dir: run, flags: [--no-such-flag]}")
    code, _, complained = finished(tmp_path)
    assert code == 2 and "does not stay up (exit code 2)" in complained
    assert "No such option" in complained and complained.count("server.log") == 1


def test_a_server_that_runs_already_is_trained_and_left_running(
    tmp_path: Path, processes: Processes
) -> None:
    server = processes.server("--backend", "fake")
    write(tmp_path, "run_async", 2, f"server: {{url: '{server.url}'}}")
    code, said, _ = finished(tmp_path)
    assert code == 0 and "step 2 of 2" in said
    assert len(read_step_entries(tmp_path / "server")) == 2 and server.returncode is None
    status = httpx.get(f"{server.url}/get_engine_status").json()
    assert (status["engine_status"], status["closed"]) == ("ENGINE.ROLLING", "training_finished")
    write(tmp_path, "run_async", 2, f"server: {{url: '{server.url}'}}")
    text = (tmp_path / "night.yaml").read_text().replace("num_repeat: 2", "num_repeat: 3")
    (tmp_path / "night.yaml").write_text(text)
    code, _, complained = finished(tmp_path)
    assert code == 2 and "runs with batch_size 2 and num_repeat 2, not 2 and 3" in complained
