"""Scripts as in AgentJet's documentation, with only their imports changed, run as processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Process, Processes, wait_until

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "ajet_scripts"
WAIT_S, END_S = 120.0, 20.0
WEREWOLVES_YAML = """
ajet:
  project_name: example_werewolves_swarm
  experiment_dir: "auto"
  rollout:
    user_workflow: null
    temperature: 0.7
    max_env_worker: 64
    num_repeat: 2
    agent_madness_reward: 0.0
    compute_madness_checklist: []
    max_response_length_in_one_turn: 16
    max_model_len: 1024
  task_reader:
    type: random_dummy
  enable_swarm_mode: True
  swarm_mode_sample_collection_method: "rollout_until_finish_enough_tasks"
  data:
    train_batch_size: 2
    max_prompt_length: 512
    max_response_length: 512
  trainer_common:
    use_kl_loss: True
    save_freq: 100
    nnodes: 1
    n_gpus_per_node: 1
hydra:
  searchpath:
    - file://ajet/default_config
defaults:
  - ajet_default
  - _self_
"""


@pytest.fixture
def server(processes: Processes) -> Process:
    return processes.server("--backend", "fake")


def steps(server: Process) -> list[Any]:
    entries = httpx.get(f"{server.url}/get_run_log").json()["entries"]
    return [entry for entry in entries if entry["kind"] == "step"]


@contextmanager
def script(
    server: Process, folder: Path, name: str, *arguments: str
) -> Generator[subprocess.Popen[str]]:
    """Run a script in a folder, and kill it at the end of the block if it still runs."""
    environment = {**os.environ, "AJET_SWARM_URL": server.url}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with (folder / f"{name}.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / name), *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "backend", [["--backend", "fake"], ["--model", "demo"]], ids=["fake", "demo"]
)
def test_the_werewolves_script_trains_until_it_is_interrupted(
    processes: Processes, tmp_path: Path, backend: list[str]
) -> None:
    server = processes.server(*backend)
    yaml_file = tmp_path / "tutorial/example_werewolves_swarm/werewolves.yaml"
    yaml_file.parent.mkdir(parents=True)
    yaml_file.write_text(WEREWOLVES_YAML)
    with script(server, tmp_path, "werewolves.py") as process:
        wait_until(lambda: len(steps(server)) >= 2 or process.poll() is not None, WAIT_S)
        assert process.poll() is None, (tmp_path / "werewolves.py.log").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) != 0
    metrics = steps(server)[0]["metrics"]
    assert {"train_won", "train_illegal"} <= metrics.keys()
    job = httpx.get(f"{server.url}/get_train_config").json()
    assert (job["batch_size"], job["num_repeat"], job["max_env_worker"]) == (2, 2, 128)
    assert (job["experiment_name"], job["temperature"]) == ("werewolves_swarm", 0.7)
    assert job["kl_loss_coef"] == 0.002


def test_the_batches_script_runs_on_several_machines_and_ends(
    server: Process, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    rows = [{"main_query": f"[[say {n}]]", "answer": str(n % 2)} for n in range(4)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (
        script(server, tmp_path, "batches.py", str(tasks)) as first,
        script(server, tmp_path, "batches.py", str(tasks)) as second,
    ):
        outputs = [process.communicate(timeout=WAIT_S)[0] for process in (first, second)]
    log = (tmp_path / "batches.py.log").read_text()
    assert first.returncode == second.returncode == 0, log
    assert set(re.findall(r"the job's (\w+) = .* is without effect", log)) <= {"n_gpu"}, log
    for output in outputs:
        assert [len(json.loads(line)) for line in output.splitlines()] == [4, 4]
        assert output == "[1.0, 1.0, 1.0, 1.0]\n[0.0, 0.0, 0.0, 0.0]\n"
    wait_until(lambda: sum(len(step["groups"]) for step in steps(server)) == 8, WAIT_S)
