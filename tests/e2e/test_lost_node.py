"""Apps see no difference when a Ray node is lost in the middle of a step of verl's trainer.

The cluster has two nodes with one worker each, on this machine and on CPUs. The embedded engine
samples. On two free cores, the first test should take about 100 seconds (85 seconds of CPU). The
second one starts the server twice, so it is `long`.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import openai
import pytest

from benchmarks.run_log_reader import read_log_entries, surviving_steps
from fakevllm_adapters.protocol.swarm import CLIENT_HEADER, EngineStatusReply
from tests.contract.ray_nodes import RayNodes, ray_nodes
from tests.e2e import journal_checks, ledgers
from tests.e2e.hook_files import write_hooks
from tests.e2e.processes import Process, Processes, wait_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

NUM_APPS = 4
SAVE_FREQ = 2
WAIT_S = 240.0
SETTLE_TIMEOUT_S = 60.0
HTTP_TIMEOUT_S = 60.0
SERVING = {"ENGINE.ROLLING", "ENGINE.ROLLING_POST", "ENGINE.WEIGHT_SYNCING"}
JOB = f"[job]\nnum_repeat = 4\nbatch_size = 2\nlr = 1e-5\nsave_freq = {SAVE_FREQ}\n"
VARIED_REWARDS = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(sum(map(ord, answer["content"] or "")) % 7) for answer in all_answers]
"""
LOST = (
    r"the verl trainer did not answer step: it exited with code 70: a Ray worker of the verl "
    r"trainer has died \([12] of 2, on Ray node 127\.0\.0\.2\): .+"
)
CAUSE = "Ray node 127.0.0.2 is dead or does not answer"
FEWER = (
    "trains with 1 of 2 workers, because no more fit on the GPUs of the Ray cluster "
    f"({CAUSE}); more are used "
)
TOO_FEW = (
    "training is off, serving goes on: the verl trainer exited with code 2: 2 workers do not fit: "
)
TOO_FEW_CAUSE = (
    f"; the cause may be that {CAUSE}: start Ray there again, or lower cluster.min_training_gpus, "
)
REMEDY = "Fix the cause, then stop the server and the proxy, and start both again"


@dataclass(slots=True)
class Run:
    """A server with two workers, a proxy, and the apps that send requests to the proxy."""

    nodes: RayNodes
    server: Process
    proxy: Process
    apps: list[Future[int]] = field(default_factory=list[Future[int]])

    @property
    def status(self) -> EngineStatusReply:
        url = f"{self.server.url}/get_engine_status"
        reply = httpx.get(url, headers={CLIENT_HEADER: "1"}, timeout=HTTP_TIMEOUT_S)
        return EngineStatusReply.model_validate(reply.json())

    @property
    def entries(self) -> list[Any]:
        return read_log_entries(self.server.folder)

    @property
    def last_step(self) -> int:
        steps = surviving_steps(self.entries)
        return steps[-1]["step"] if steps else 0

    @property
    def errors(self) -> list[str]:
        return [line for line in self.server.log.splitlines() if " ERROR " in line]

    @property
    def num_requests(self) -> int:
        return ledgers.rows(self.proxy, "select count(*) from groups")[0][0]

    @property
    def num_settled(self) -> int:
        query = "select count(*) from groups where state != 'scored'"
        return ledgers.rows(self.proxy, query)[0][0]

    @property
    def newest_answer(self) -> int:
        """The newest version of the weights that has answered an app."""
        query = "select coalesce(max(weight_version), 0) from calls"
        return ledgers.rows(self.proxy, query)[0][0]

    def wait(self, condition: Callable[[], bool], awaited: str) -> None:
        """Wait until the condition holds. Fail if an app ends before, because of an error."""

        def holds() -> bool:
            for app in self.apps:
                assert not app.done(), app.result()
            return condition()

        wait_until(holds, WAIT_S, awaited)

    @contextmanager
    def served_apps(self) -> Generator[None]:
        """Let apps send requests all the time, and check at the end that each request of each app
        was answered with 200."""
        is_over = Event()
        with ThreadPoolExecutor(NUM_APPS) as pool:
            self.apps = [pool.submit(ask, self.proxy, at, is_over) for at in range(NUM_APPS)]
            try:
                yield
            finally:
                is_over.set()
            num_answers = sum(app.result() for app in self.apps)
        self.apps = []
        wait_until(lambda: self.num_settled == num_answers, SETTLE_TIMEOUT_S, "the ledger")
        rows = ledgers.rows(self.proxy, "select distinct status from groups")
        assert [row["status"] for row in rows] == [200]

    def lose_node(self, number: int) -> None:
        """Kill a node in the middle of a step, which cannot end before."""
        self.wait(lambda: self.last_step > SAVE_FREQ, "a step after the first checkpoint")
        worker = self.nodes.worker(number)
        planned = "select count(*) from batches where state = 'planned'"

        def is_frozen_in_a_step() -> bool:
            # A worker that is frozen while weights are published would delay the next step.
            os.kill(worker, signal.SIGCONT)
            if not journal_checks.rows(self.server.folder, planned)[0][0]:
                return False
            os.kill(worker, signal.SIGSTOP)
            return journal_checks.rows(self.server.folder, planned)[0][0] > 0

        self.wait(is_frozen_in_a_step, "a step")
        self.nodes.kill(number)


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Processes]:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Generator[RayNodes]:
    with ray_nodes(2) as cluster:
        for name, value in cluster.environ.items():
            monkeypatch.setenv(name, value)
        yield cluster


def test_training_goes_on_with_one_worker_and_apps_see_no_error_when_a_node_dies_in_a_step(
    nodes: RayNodes, processes: Processes
) -> None:
    run = start(nodes, processes, min_training_gpus=1)
    with run.served_apps():
        run.lose_node(2)
        run.wait(lambda: run.status.engine_status_detail is not None, "the loss in the status")
        status = run.status
        assert re.fullmatch(LOST, status.engine_status_detail or "")
        assert status.engine_status in SERVING
        newest, version = run.newest_answer, status.weight_version
        run.wait(lambda: FEWER in run.server.log, "the line about the workers")
        run.wait(lambda: run.newest_answer > version + SAVE_FREQ, "answers of newer versions")
        assert newest <= version
        assert run.status.engine_status_detail is None
    (error,) = run.errors
    assert re.search(f"{LOST}; starting it again in 1 s$", error)
    assert run.server.log.count(FEWER) == 1
    (restored,) = (entry["step"] for entry in run.entries if entry["kind"] == "restored")
    assert restored >= SAVE_FREQ and restored % SAVE_FREQ == 0
    check_groups(run)


@pytest.mark.long
def test_training_stops_with_one_line_when_too_few_workers_are_left_until_the_node_is_back(
    nodes: RayNodes, processes: Processes
) -> None:
    run = start(nodes, processes)
    with run.served_apps():
        run.lose_node(2)
        run.wait(lambda: run.status.closed is not None, "the end of training")
        status = run.status
        assert (status.engine_status, status.closed) == ("ENGINE.ROLLING", "training_refused")
        line = status.engine_status_detail or ""
        assert line.startswith(TOO_FEW) and TOO_FEW_CAUSE in line
        assert line.endswith(REMEDY) and "\n" not in line
        loss, refusal = run.errors
        assert re.search(f"{LOST}; starting it again in 1 s$", loss)
        assert refusal.endswith(line)
        num_before = run.num_requests
        run.wait(lambda: run.num_requests > num_before + 4 * NUM_APPS, "answers of the engine")
    last_step = run.last_step
    for process in (run.proxy, run.server):
        process.stop()
    assert nodes.add() == 2, "another node than the lost one"
    run.server.start()
    run.server.wait_until_healthy()
    run.proxy.start()
    run.proxy.wait_until_healthy(WAIT_S)
    run.wait(lambda: run.last_step > last_step, "the step during which the node was lost")
    check_groups(run)


def start(nodes: RayNodes, processes: Processes, **cluster: int) -> Run:
    """Start a server with two workers, and a proxy. `cluster` has further keys of the section."""
    section = {"nodes": 2, "gpus_per_node": 1, "training_gpus": 2, "colocate": "shared"}
    section |= {"ray_address": nodes.address} | cluster
    config = processes.folder / "server.yaml"
    config.write_text(json.dumps({"cluster": section}))
    engines = ["--rollout", "embedded", "--trainer", "verl", "--model", "demo"]
    weights = ["--weights-dir", str(processes.folder / "weights")]
    server = processes.server(*engines, *weights, "--config", str(config))
    job = processes.folder / "fakevllm.toml"
    job.write_text(JOB)
    hooks = write_hooks(processes.folder / "hooks", VARIED_REWARDS)
    proxy = processes.proxy(server, "--config", str(job), "--hooks", str(hooks), wait=False)
    return Run(nodes, server, proxy.wait_until_healthy(WAIT_S))


def ask(proxy: Process, number: int, is_over: Event) -> int:
    """Send requests until the test is over, and return the number of answers. An error that an app
    would see is raised at once, because there are no retries."""
    num_answers = 0
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="sk", max_retries=0) as app:
        while not is_over.is_set():
            question: Any = [{"role": "user", "content": f"What is {number} + {num_answers % 10}?"}]
            reply = app.chat.completions.create(model="demo", messages=question, max_tokens=24)
            assert reply.choices[0].finish_reason in ("stop", "length")
            num_answers += 1
    return num_answers


def check_groups(run: Run) -> None:
    """Check that no group is trained twice, and that none is lost without a reason."""
    wait_until(lambda: trained_in_ledger(run) == consumed(run), SETTLE_TIMEOUT_S, "the ledger")
    survivors = surviving_steps(run.entries)
    assert [entry["step"] for entry in survivors] == list(range(1, len(survivors) + 1))
    trained = Counter(group["group_id"] for entry in survivors for group in entry["groups"])
    assert set(trained.values()) == {1}
    batches = {
        (entry["step"], tuple(group["group_id"] for group in entry["groups"]))
        for entry in run.entries
        if entry["kind"] == "step"
    }
    assert len(batches) == len(survivors), "a repeated step had other groups than before"
    query = "select group_id, state, reason from groups"
    at_server = {name: state for name, *state in journal_checks.rows(run.server.folder, query)}
    assert {name for name, (state, _) in at_server.items() if state == "consumed"} == set(trained)
    assert all(reason for state, reason in at_server.values() if state == "dropped")
    for name, state, reason in ledgers.rows(run.proxy, query):
        assert state not in ("failed", "lost"), (name, reason)
        assert name in at_server if state in ("trained", "pooled") else reason, (name, state)


def trained_in_ledger(run: Run) -> set[str]:
    rows = ledgers.rows(run.proxy, "select group_id from groups where state = 'trained'")
    return {row["group_id"] for row in rows}


def consumed(run: Run) -> set[str]:
    query = "select group_id from groups where state = 'consumed'"
    return {name for (name,) in journal_checks.rows(run.server.folder, query)}
