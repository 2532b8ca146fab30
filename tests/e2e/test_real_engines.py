"""Tests of the demo's task with vLLM as the sampler and the embedded engine as the trainer.

The processes are started with their commands, the apps are openai clients, and processes are killed
with SIGKILL.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import openai
import pytest

from benchmarks.run_log_reader import read_step_entries
from fakevllm.demo.tasks import all_tasks
from fakevllm.replay.proxy_queries import register_tasks
from fakevllm_adapters.protocol.swarm import Task
from fakevllm_server.backends.process.procfs import live_processes
from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes
from tests.e2e.request_variants import send_each_variant
from tests.e2e.test_known_prompt import check_agreement

pytestmark = [pytest.mark.real, pytest.mark.slow]

READY_TIMEOUT_S = 400.0
NUM_CLIENTS = 8
NUM_SIBLINGS = 8
SUCCESSORS = [f"Which number follows {number}?" for number in range(NUM_CLIENTS)]
"""The questions that the clients ask while vLLM is killed, one for each client. None of them is a
question of the demo's tasks."""
FEW_STEPS = 10
MANY_STEPS = 40
"""Steps after which the reward has risen."""
PARENT = 1
"""Index of the parent's id among the fields that fakevllm_server.backends.process.procfs reads."""


@dataclass(frozen=True, slots=True)
class VllmStack:
    """A server whose engine is vLLM, and a proxy in front of it."""

    server: Process
    proxy: Process


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmStack]:
    with Processes(tmp_path_factory.mktemp("vllm")) as started:
        yield start_stack(started)


def start_stack(started: Processes, *flags: str, trainer: str = "embedded") -> VllmStack:
    """Start a server with vLLM, a trainer and these further flags, and a proxy."""
    config = started.folder / "fakevllm.toml"
    config.write_text(
        f"[job]\nbatch_size = 8\nnum_repeat = {NUM_SIBLINGS}\nlr = 4e-4\nppo_epochs = 2\n"
    )
    engines = ["--rollout", "vllm", "--trainer", trainer, "--model", "demo"]
    server = started.server(*engines, *flags)
    hooks = write_hooks(started.folder / "hooks", SUMS_HOOK)
    proxy = started.proxy(server, "--config", str(config), "--hooks", str(hooks), wait=False)
    return VllmStack(server, proxy.wait_until_healthy(READY_TIMEOUT_S))


@pytest.mark.timeout(700)
def test_with_vllm_every_variant_of_requests_is_trained_with_exact_tokens(stack: VllmStack) -> None:
    means = train(stack, FEW_STEPS)
    assert len(means) == FEW_STEPS
    check_agreement(stack.server)


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("trainer", "num_gpus"),
    [("embedded", 1), pytest.param("verl", 2, marks=pytest.mark.long)],
)
def test_weights_are_sent_to_a_vllm_that_sleeps_during_each_step(
    tmp_path: Path, trainer: str, num_gpus: int
) -> None:
    # On a CPU, vLLM accepts that it shall sleep, and frees nothing.
    gpus = f"gpus_per_node: {num_gpus}, training_gpus: {num_gpus}"
    (tmp_path / "server.yaml").write_text(
        f"weight-transport: vllm\ncluster: {{{gpus}, colocate: sleep}}\n"
    )
    with Processes(tmp_path) as started:
        stack = start_stack(started, "--config", str(tmp_path / "server.yaml"), trainer=trainer)
        train(stack, FEW_STEPS, fidelity=None if trainer == "verl" else 1.0)
        check_agreement(stack.server)
        log = (stack.server.folder / "engine.log").read_text()
        assert "it loads them from a folder" not in stack.server.log
    assert log.count("to fall asleep") >= FEW_STEPS
    assert "Reloading weights inplace" not in log


@pytest.mark.long
@pytest.mark.timeout(900)
def test_with_vllm_the_reward_rises_with_every_variant_of_requests(stack: VllmStack) -> None:
    means = train(stack, MANY_STEPS)
    assert mean(means[-8:]) - mean(means[:4]) >= 0.2


def train(stack: VllmStack, num_steps: int, fidelity: float | None = 1.0) -> list[float]:
    """Train on the demo's questions, and send requests of every variant meanwhile.

    Return the mean reward of each of the `num_steps` steps. `fidelity` is the expected
    `token_fidelity` of each step, which the verl trainer does not measure.
    """
    asyncio.run(play_until_trained(stack.proxy, stack.server, num_steps))
    steps = read_step_entries(stack.server.folder)[:num_steps]
    query = "select count(*) as n from calls where untrainable is not null"
    print("calls that could not be trained:", rows(stack.proxy, query)[0]["n"])
    means = [entry["metrics"]["reward_mean"] for entry in steps]
    print(" ".join(f"{value:.2f}" for value in means))
    assert [entry["step"] for entry in steps] == list(range(1, num_steps + 1))
    assert {entry["metrics"].get("token_fidelity") for entry in steps} == {fidelity}
    return means


async def play_until_trained(proxy: Process, server: Process, num_steps: int) -> None:
    """Send the demo's questions as eight users, and each variant of requests as a ninth user."""
    tasks = all_tasks()
    keys = await register_tasks(f"{proxy.url}/v1", tasks)

    def is_trained() -> bool:
        return any(entry["step"] >= num_steps for entry in read_step_entries(server.folder))

    async def user(turns: Iterator[Task]) -> None:
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="sk") as app:
            while not is_trained():
                task = next(turns)
                await app.with_options(api_key=keys[task.task_id]).chat.completions.create(
                    model="demo",
                    messages=[{"role": "user", "content": task.main_query}],
                    max_tokens=24,
                )

    def user_of_variants() -> None:
        with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="sk") as app:
            for _ in range(4):
                send_each_variant(app)

    turns = itertools.cycle(tasks)
    await asyncio.gather(
        asyncio.to_thread(user_of_variants), *(user(turns) for _ in range(NUM_CLIENTS))
    )


@pytest.mark.timeout(600)
def test_a_killed_vllm_is_restarted_and_every_request_is_answered(stack: VllmStack) -> None:
    (num_before,) = rows(stack.proxy, "select count(*) from groups")[0]
    num_answers = asyncio.run(send_while_vllm_is_killed(stack.proxy, stack.server))
    groups = wait_for_groups(stack.proxy, num_before + num_answers)
    asked = {group["group_id"]: group for group in groups if group["question"] in SUCCESSORS}
    assert len(asked) == num_answers
    states = {group["state"] for group in asked.values()}
    assert states <= {"served", "pooled", "trained", "dropped"}
    query = "select count(*) as n, group_id from siblings where text is not null group by 2"
    complete = {row["group_id"]: row["n"] for row in rows(stack.proxy, query)}
    assert {complete[group_id] for group_id in asked} == {NUM_SIBLINGS}, (
        "all siblings of an interrupted group are sampled again"
    )


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


async def send_while_vllm_is_killed(proxy: Process, server: Process) -> int:
    """Send requests with eight clients, kill vLLM meanwhile, and return the number of answers.

    Each request of each client must be answered.
    """
    killed = asyncio.Event()
    num_answers = 0

    async def client(app: openai.AsyncOpenAI, number: int) -> None:
        nonlocal num_answers
        after_the_kill = 0
        while after_the_kill < 5:
            was_killed = killed.is_set()
            reply = await app.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": SUCCESSORS[number]}],
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
    """Return the process ids of vLLM's API server, which its process supervisor started."""
    children = live_processes(PARENT, server.pid)
    supervisors = [pid for pid in children if "vllm.process_supervisor" in command_of(pid)]
    pids = [pid for supervisor in supervisors for pid in live_processes(PARENT, supervisor)]
    assert pids
    return pids


def command_of(pid: int) -> str:
    return (Path("/proc") / str(pid) / "cmdline").read_text()
