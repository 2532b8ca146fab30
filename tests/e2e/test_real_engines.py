"""The demo's task on the engines people run: vLLM samples, the embedded engine or verl trains.

The processes are those of a user; apps are real openai clients; what dies is killed with -9.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import openai
import pytest

from fakevllm.demo.sums import all_tasks
from fakevllm.replay.proxy import register
from fakevllm_adapters.swarm import Task
from tests.e2e.every_shape import ask_in_every_shape
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes, wait_until

pytestmark = [pytest.mark.real, pytest.mark.slow]

READY_TIMEOUT_S = 240.0
NUM_CLIENTS = 8
STEPS = 40


def entries_of(run_dir: Path) -> list[Any]:
    """The run's log."""
    file = run_dir / "runlog.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


@dataclass(frozen=True, slots=True)
class Demo:
    """One running `fakevllm demo`."""

    process: subprocess.Popen[bytes]
    folder: Path
    json_file: Path
    log_file: Path

    @property
    def entries(self) -> list[Any]:
        return entries_of(self.folder)

    @property
    def steps(self) -> list[Any]:
        return [entry for entry in self.entries if entry["kind"] == "step"]

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.log_file.read_text()
            return any(entry["step"] >= step for entry in self.steps)

        wait_until(reached, READY_TIMEOUT_S, f"step {step}")

    def outcome(self, timeout_s: float) -> Any:
        """When it has ended well."""
        assert self.process.wait(timeout=timeout_s) == 0, self.log_file.read_text()
        outcome = json.loads(self.json_file.read_text())
        print({key: outcome[key] for key in ("before", "after", "wall_s", "restarts", "groups")})
        print(" ".join(f"{value:.2f}" for value in outcome["policy_mean"]))
        return outcome


@contextmanager
def demo(folder: Path, *arguments: str) -> Generator[Demo]:
    """Ended, if need be, with all it started."""
    run = folder / "run"
    command = [sys.executable, "-m", "fakevllm", "demo", *arguments]
    command += ["--run-dir", str(run), "--json", str(folder / "result.json")]
    with (folder / "demo.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield Demo(process, run, folder / "result.json", folder / "demo.log")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        for file in sorted(run.glob("*.log")):
            print(f"--- {file}", *file.read_text(errors="replace").splitlines()[-40:], sep="\n")


@pytest.mark.timeout(500)
def test_with_vllm_the_reward_rises_under_requests_of_every_shape(tmp_path: Path) -> None:
    with Processes(tmp_path) as started:
        config = tmp_path / "fakevllm.toml"
        config.write_text(
            "[job]\nbatch_size = 8\nnum_repeat = 8\nlr = 4e-4\nppo_epochs = 2\n"
            f"total_training_steps = {STEPS}\n"
        )
        server = started.server("--rollout", "vllm", "--trainer", "embedded", "--model", "demo")
        hooks = write_hook(tmp_path / "hooks", SUMS_HOOK)
        proxy = started.proxy(server, "--config", str(config), "--hooks", hooks, wait=False)
        proxy.wait_until_healthy(READY_TIMEOUT_S)
        asyncio.run(play_until_trained(proxy, server))
        steps = [entry for entry in entries_of(server.folder) if entry["kind"] == "step"]
        odd = rows(proxy, "select count(*) as n from calls where untrainable is not null")
        print("calls that could not be trained:", odd[0]["n"])
    means = [entry["metrics"]["reward_mean"] for entry in steps]
    print(" ".join(f"{value:.2f}" for value in means))
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    assert mean(means[-8:]) - mean(means[:4]) >= 0.2


async def play_until_trained(proxy: Process, server: Process) -> None:
    """Eight users ask the demo's questions, a ninth asks in every shape there is."""
    tasks = all_tasks()
    keys = await register(f"{proxy.url}/v1", tasks)

    def is_trained() -> bool:
        return any(entry["step"] == STEPS for entry in entries_of(server.folder))

    async def user(turns: Iterator[Task]) -> None:
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="sk") as app:
            while not is_trained():
                task = next(turns)
                await app.with_options(api_key=keys[task.task_id]).chat.completions.create(
                    model="demo",
                    messages=[{"role": "user", "content": task.main_query}],
                    max_tokens=24,
                )

    def odd_user() -> None:
        with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="sk") as app:
            for _ in range(4):
                ask_in_every_shape(app)

    turns = itertools.cycle(tasks)
    await asyncio.gather(asyncio.to_thread(odd_user), *(user(turns) for _ in range(NUM_CLIENTS)))


@pytest.mark.timeout(500)
def test_with_verl_the_reward_rises_and_its_probabilities_are_vllms(tmp_path: Path) -> None:
    with demo(tmp_path, "--backend", "verl", "--steps", "10") as running:
        outcome = running.outcome(timeout_s=400)
    first, *_ = metrics = [entry["metrics"] for entry in running.steps]
    print("prob_diff_max", " ".join(f"{step['prob_diff_max']:.1e}" for step in metrics))
    assert abs(first["ppo_kl"]) < 1e-6
    assert first["mismatch"] < 1e-6, "mean of |log-probability of vLLM's - of verl's|"
    assert first["prob_diff_max"] < 2e-6, "the greatest of some 400, in float32"
    assert [entry["step"] for entry in running.steps] == list(range(1, 11))
    assert outcome["after"] > outcome["before"]
    assert mean(outcome["policy_mean"][-3:]) > mean(outcome["policy_mean"][:3])


@pytest.mark.timeout(500)
def test_a_killed_ray_worker_is_started_again_and_the_steps_go_on_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    with demo(tmp_path, "--backend", "verl", "--steps", "14") as running:
        running.wait_for_step(11)
        (worker,) = ray_workers("PolicyWorker")
        os.kill(worker, signal.SIGKILL)
        running.outcome(timeout_s=400)
    restored = [entry for entry in running.entries if entry["kind"] == "restored"]
    assert [entry["step"] for entry in restored] == [10], "the last checkpoint before it"
    assert restored[0]["lost"], "what was trained since the checkpoint is told"
    trained = [group["group_id"] for entry in running.steps for group in entry["groups"]]
    assert len(trained) == len(set(trained))
    assert running.steps[-1]["step"] == 14


@pytest.mark.timeout(400)
def test_a_killed_vllm_comes_back_by_itself_and_every_client_is_answered(tmp_path: Path) -> None:
    with Processes(tmp_path) as started:
        config = tmp_path / "fakevllm.toml"
        config.write_text("[job]\nbatch_size = 4\nnum_repeat = 4\nlr = 1e-4\n")
        hooks = write_hook(tmp_path / "hooks", LENGTH_HOOK)
        server = started.server("--rollout", "vllm", "--trainer", "embedded", "--model", "demo")
        proxy = started.proxy(server, "--config", str(config), "--hooks", hooks, wait=False)
        proxy.wait_until_healthy(READY_TIMEOUT_S)
        num_answers = asyncio.run(under_load(proxy, server))
        groups = wait_for_groups(proxy, num_answers)
        assert len(groups) == num_answers
        assert {group["state"] for group in groups} <= {"served", "pooled", "trained", "dropped"}
        siblings = rows(
            proxy, "select count(*) as n, group_id from siblings where text is not null group by 2"
        )
        assert {row["n"] for row in siblings} == {4}, "a group that was cut is asked whole again"


SUMS_HOOK = """
from fakevllm.demo.hooks.on_compute_relative_reward import score

def on_compute_relative_reward(valid_results, all_answers):
    return [
        score(sibling, answer) if sibling.task.metadata else finished(answer)
        for sibling, answer in zip(valid_results, all_answers, strict=True)
    ]

def finished(answer):
    return float(answer["finish_reason"] != "length")
"""
LENGTH_HOOK = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(len(answer["content"] or "")) for answer in all_answers]
"""


def write_hook(folder: Path, source: str) -> str:
    folder.mkdir()
    (folder / "on_compute_relative_reward.py").write_text(source)
    return str(folder)


async def under_load(proxy: Process, server: Process) -> int:
    """Eight clients ask and ask; meanwhile vLLM is killed. How many answers they got: each client
    all it asked for."""
    killed = asyncio.Event()
    num_answers = 0

    async def client(app: openai.AsyncOpenAI, number: int) -> None:
        nonlocal num_answers
        after_the_kill = 0
        while after_the_kill < 5:
            was_killed = killed.is_set()
            reply = await app.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": f"What is {number} plus 1?"}],
                max_tokens=24,
            )
            assert reply.choices[0].finish_reason in ("stop", "length")
            num_answers += 1
            after_the_kill += was_killed

    async def kill() -> None:
        while num_answers < 3 * NUM_CLIENTS:
            await asyncio.sleep(0.05)
        for pid in vllm_processes(server):
            os.kill(pid, signal.SIGKILL)
        killed.set()

    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="sk-any", timeout=200) as app:
        await asyncio.gather(kill(), *(client(app, number) for number in range(NUM_CLIENTS)))
    return num_answers


def vllm_processes(server: Process) -> list[int]:
    """vLLM's API process of this server: the one that was told the socket, beside its keeper."""
    socket = str(server.folder / "engine.sock")
    found = [
        pid
        for pid, command in commands()
        if socket in command and "keeper" not in command and "fakevllm_server\0start" not in command
    ]
    assert found
    return found


def ray_workers(name: str) -> list[int]:
    """Ray calls a worker's process by its actor's name."""
    return [pid for pid, command in commands() if command.startswith("ray::") and name in command]


def commands() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                yield int(folder.name), (folder / "cmdline").read_bytes().decode()
            except OSError:
                continue
