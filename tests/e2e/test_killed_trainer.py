"""V9: apps see no difference when the trainer is killed repeatedly in the middle of a step. The
server has one rollout engine, or two replicas."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import openai
import pytest

from benchmarks.run_log_reader import read_log_entries, surviving_steps
from fakevllm_adapters.protocol.swarm import CLIENT_HEADER, EngineStatusReply
from fakevllm_server.backends.process.procfs import live_processes
from tests.e2e import two_engine_server
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes, free_port, wait_until

NUM_APPS = 4
NUM_KILLS = 3
PARENT = 1
"""Index of the parent's id among the fields that fakevllm_server.backends.process.procfs reads."""
WAIT_S = 40.0
IN_A_STEP = "ENGINE.WEIGHT_SYNCING"
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_no_request_fails_while_the_trainer_is_killed_in_a_step_and_training_continues(
    tmp_path: Path, num_replicas: int
) -> None:
    with Processes(tmp_path) as started:
        server = _start_server(started, num_replicas)
        proxy = _start_proxy(started, server)
        is_over = Event()
        with ThreadPoolExecutor(NUM_APPS) as pool:
            apps = [
                pool.submit(_send_requests, proxy, is_over, bool(at % 2)) for at in range(NUM_APPS)
            ]
            try:
                for _ in range(NUM_KILLS):
                    _wait_until(apps, lambda before=_num_steps(server): _num_steps(server) > before)
                    (trainer,) = _trainers_of(server)
                    os.kill(trainer, signal.SIGSTOP)  # so that the next step does not end
                    _wait_until(apps, lambda: _status(server).engine_status == IN_A_STEP)
                    os.kill(trainer, signal.SIGKILL)
                    _wait_until(
                        apps, lambda old=trainer: set(_trainers_of(server)) - {old} != set()
                    )
                _wait_until(apps, lambda before=_num_steps(server): _num_steps(server) > before)
            finally:
                is_over.set()
            answers = [answer for app in apps for answer in app.result()]
        assert set(answers) <= {"yes.", "no."} and len(answers) >= NUM_APPS * NUM_KILLS
        restored = [
            entry for entry in read_log_entries(server.folder) if entry["kind"] == "restored"
        ]
        assert len(restored) >= NUM_KILLS
        steps = [entry["step"] for entry in surviving_steps(read_log_entries(server.folder))]
        assert steps == list(range(1, len(steps) + 1))
        restarts = [replica.restarts for replica in _status(server).replicas]
        assert restarts == ([0, 0] if num_replicas == 2 else []), "the replicas go on"


def _start_server(started: Processes, num_replicas: int) -> Process:
    if num_replicas > 1:
        return started.server("--backend", "fake", "--replicas", str(num_replicas))
    port, own = free_port(), started.folder / "server"
    command = [two_engine_server.__file__, "start", "--backend", "fake"]
    command += ["--port", str(port), "--run-dir", str(own)]
    return started.adopt(Process("server", command, port, own)).wait_until_healthy()


def _start_proxy(started: Processes, server: Process) -> Process:
    hooks = write_hooks(started.folder / "hooks", PREFER_YES)
    config = started.folder / "fakevllm.toml"
    config.write_text("[job]\nnum_repeat = 2\nbatch_size = 2\nlr = 0.1\nsave_freq = 3\n")
    return started.proxy(server, "--config", str(config), "--hooks", str(hooks))


def _status(server: Process) -> EngineStatusReply:
    headers = {CLIENT_HEADER: "1"}
    reply = httpx.get(f"{server.url}/get_engine_status", headers=headers, timeout=WAIT_S)
    return EngineStatusReply.model_validate(reply.json())


def _send_requests(proxy: Process, is_over: Event, streamed: bool) -> list[str]:
    """Send requests until the test is over, and return the answers.

    There are no retries: an error that an app would see is raised at once.
    """
    answers: list[str] = []
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="sk", max_retries=0) as app:
        create = app.chat.completions.create
        while not is_over.is_set():
            if streamed:
                chunks = create(model="fake", messages=HI, stream=True)
                deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
                answers.append("".join(delta or "" for delta in deltas))
            else:
                answers.append(create(model="fake", messages=HI).choices[0].message.content or "")
    return answers


def _wait_until(apps: list[Future[list[str]]], condition: Callable[[], bool]) -> None:
    """Wait for the condition, and fail if an app ends before."""

    def holds() -> bool:
        for app in apps:
            if app.done():
                app.result()
                raise AssertionError("an app ended early")
        return condition()

    wait_until(holds, WAIT_S)


def _num_steps(server: Process) -> int:
    """Return the number of steps in the log; a repeated step counts each time."""
    return sum(entry["kind"] == "step" for entry in read_log_entries(server.folder))


def _trainers_of(server: Process) -> list[int]:
    """Return the process ids of the server's trainer: one or none."""
    return [pid for pid in live_processes(PARENT, server.pid) if "--train-only" in _command_of(pid)]


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # the process has ended meanwhile
        return ""
