"""Tests of the commands and files that show a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.e2e.ledgers import wait_for_groups
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.test_active_clients import ask, claim, end
from tests.swarm_server.curves.readings import Charts

JSON_LOG = ("--log-format", "json")


def fakevllm(program: str, folder: Path, *arguments: str) -> str:
    done = PRELOADED_PYTHON.run(["-m", program, *arguments], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines(process: Process) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.log.splitlines()]


def train(server: Process, proxy: Process) -> None:
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="any") as app:
        app.chat.completions.create(model="fake", messages=[{"role": "user", "content": "well?"}])
    wait_until(lambda: num_steps(server) > 0, 20)


def num_steps(server: Process) -> int:
    entries = httpx.get(f"{server.url}/get_run_log").json()["entries"]
    return sum(entry["kind"] == "step" for entry in entries)


def test_a_run_can_be_inspected_while_it_runs_and_afterwards(
    processes: Processes, yes_hooks: Path
) -> None:
    config = processes.folder / "job.toml"
    # The fake engine's answers are random and may tie. With an entropy bonus, ties are trained too.
    config.write_text("[job]\nbatch_size = 1\nentropy_coeff = 0.1\n")
    server = processes.server("--backend", "fake", *JSON_LOG)
    hooks = ("--config", str(config), "--hooks", str(yes_hooks), "--n", "2")
    proxy = processes.proxy(server, *hooks, *JSON_LOG)
    train(server, proxy)
    wait_for_groups(proxy, 1, states="trained")

    group = fakevllm("fakevllm", proxy.folder, "tokens", "--run-dir", ".", "--swarm", server.url)
    assert "trained, step 1" in group and "advantage" in group
    assert "Texts are missing" not in group  # the engine provides the texts
    episode = claim(server)
    assert ask(episode, "[[say one]]") == "one"
    command = ("tokens", episode["episode_uuid"], "--run-dir", ".", "--swarm", server.url)
    assert "open" in fakevllm("fakevllm", proxy.folder, *command)
    fakevllm("fakevllm", proxy.folder, *command, "--html", "page.html")
    assert "not in the loss" in (proxy.folder / "page.html").read_text()
    evaluated = claim(server, kind="eval")
    assert end(server, evaluated, 0.5) == {"success": True}
    assert httpx.get(f"{server.url}/get_episode_tokens?episode=no").status_code == 404

    server.stop()
    proxy.stop()
    charts = Charts(server.folder)
    assert charts.steps() == [1]
    assert charts.points("val/reward/mean") == [(1, 0.5)]
    output = fakevllm("fakevllm_server", server.folder, "curves", "--run-dir", ".")
    assert "2 points written" in output
    assert Charts(server.folder).steps() == [1]

    run = json.loads((server.folder / "run.json").read_text())
    (start,) = run["lives"]
    assert start["job"]["entropy_coeff"] == 0.1
    assert start["engines"]["rollout"] == "fake"

    for process in (server, proxy):
        assert {"time", "level", "logger", "message"} <= lines(process)[0].keys()
    (step,) = [line for line in lines(server) if line.get("step") == 1]
    assert step["version"] == 1 and "reward_mean" in step["metrics"]


def test_the_curves_command_refuses_a_run_whose_server_is_running(processes: Processes) -> None:
    server = processes.server("--backend", "fake").wait_until_healthy()
    command = ["-m", "fakevllm_server", "curves", "--run-dir", "."]
    done = PRELOADED_PYTHON.run(command, server.folder)
    assert done.returncode == 2
    assert "uses ., and a running server writes the curves itself" in done.stderr
    assert "tensorboard --logdir tensorboard" in done.stderr and "--run-dir" not in done.stderr
