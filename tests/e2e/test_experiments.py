"""Clients choose the run by the name of the experiment, without access to the server's machine."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm import SwarmClient, TrainJob
from fakevllm.sdk.types import SwarmError
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.test_job_changes import WAIT_S, play, start, status


def runs(client: SwarmClient) -> dict[str, dict[str, Any]]:
    """Return the server's list of runs, by folder."""
    reply = httpx.get(f"{client.server_url}/get_runs").json()
    return {run["folder"]: run for run in reply["runs"]}


def current_run(client: SwarmClient) -> str:
    (folder,) = [folder for folder, run in runs(client).items() if run["is_current"]]
    return folder


def train_to(client: SwarmClient, step: int) -> None:
    """Train until the server collects this step."""
    while client.get_global_step() < step:
        next_step = client.get_global_step() + 1
        play(client, 0.0, 1.0, 0.0, 1.0)
        wait_until(partial(_has_reached, client, next_step), WAIT_S)


def _has_reached(client: SwarmClient, step: int) -> bool:
    return client.get_global_step() >= step


def restart(server: Process) -> None:
    """Kill the server, and start it again on its run directory."""
    server.kill()
    server.start()
    server.wait_until_healthy()


def test_a_new_name_starts_a_new_run_and_an_old_name_resumes_its_run(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    folder = processes.folder / "server"
    with SwarmClient(server.url) as client:
        start(client, experiment_name="a")
        train_to(client, 3)
        play(client, 0.0, 1.0)
        before = status(client)
        start(client, experiment_name="b")
        new = status(client)
        assert (new["global_step"], new["weight_version"]) == (1, 0)
        assert new["run_id"] != before["run_id"] and set(new["waiting"].values()) == {0}
        assert client.server_experiment_dir() == str((folder / "runs/b").resolve())
        train_to(client, 2)
        start(client, experiment_name="a")
        again = status(client)
        assert (again["global_step"], again["run_id"]) == (3, before["run_id"])
        assert again["waiting"]["partial_tasks"] == 1 and again["dropped"] == {}
        assert again["weight_version"] >= before["weight_version"]
        play(client, 0.0, 1.0)
        wait_until(lambda: client.get_global_step() == 4, WAIT_S)
        start(client, experiment_name="b")
        assert client.get_global_step() == 2
        assert {name: run["last_step"] for name, run in runs(client).items()} == {
            ".": 3,
            "runs/b": 1,
        }
        assert all(run["num_bytes"] > 10_000 for run in runs(client).values())
    assert (folder / "journal.sqlite").is_file() and (folder / "checkpoints").is_dir()
    assert (folder / "runs/b/journal.sqlite").is_file() and (folder / "runs/b/checkpoints").is_dir()


def test_a_killed_server_continues_with_the_run_that_was_current(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    with SwarmClient(server.url) as client:
        start(client, experiment_name="a")
        start(client, experiment_name="b", save_freq=1)
        train_to(client, 2)
        before = status(client)
        restart(server)
        wait_until(lambda: status(client)["engine_status"] == "ENGINE.ROLLING", WAIT_S)
        after = status(client)
        assert (after["run_id"], after["global_step"]) == (before["run_id"], 2)
        client.stop_engine()
        assert status(client)["run_id"] == before["run_id"]
        start(client, experiment_name="a")
        assert current_run(client) == "."


def test_a_job_without_a_name_continues_the_run_at_the_top(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    with SwarmClient(server.url) as client:
        start(client, experiment_name="a")
        for name, folder in ((None, "."), ("b", "runs/b"), (None, "."), ("a", ".")):
            start(client, experiment_name=name)
            assert current_run(client) == folder


def test_the_run_directory_of_an_older_server_stays_the_run_that_its_files_name(
    processes: Processes,
) -> None:
    server = processes.server("--backend", "fake")
    file = processes.folder / "server" / "run.json"
    with SwarmClient(server.url) as client:
        start(client, experiment_name="a", save_freq=1)
        train_to(client, 2)
        for is_kept in (True, False):
            client.stop_engine()
            server.stop()
            written = json.loads(file.read_text())
            assert written.pop("experiment_name") == "a"
            file.write_text(json.dumps(written)) if is_kept else file.unlink()
            (processes.folder / "server" / "current_run").unlink(missing_ok=True)
            server.start()
            server.wait_until_healthy()
            start(client, experiment_name="b")
            assert (current_run(client), client.get_global_step()) == ("runs/b", 1)
            start(client, experiment_name="a")
            assert (current_run(client), client.get_global_step()) == (".", 2)


def test_a_run_changes_only_when_the_engine_is_started(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    with SwarmClient(server.url) as client:
        start(client, experiment_name="a")
        before = status(client)["run_id"]
        client.stop_engine()
        config = {"yaml_as_string": "job: {experiment_name: b}"}
        assert httpx.post(f"{server.url}/sync_train_config", json=config).json()["success"]
        assert status(client)["run_id"] == before and current_run(client) == "."
        assert httpx.post(f"{server.url}/start_engine").json()["success"]
        assert status(client)["run_id"] != before and current_run(client) == "runs/b"


def test_a_name_never_leaves_the_run_directory(processes: Processes, tmp_path: Path) -> None:
    server = processes.server("--backend", "fake")
    folder = processes.folder / "server"
    with SwarmClient(server.url) as client:
        start(client, experiment_name="a")
        start(client, experiment_name="../../outside")
        assert current_run(client).startswith("runs/outside~")
        client.stop_engine()
        (tmp_path / "elsewhere").mkdir()
        (folder / "runs" / "linked").symlink_to(tmp_path / "elsewhere")
        config = {"yaml_as_string": "job: {experiment_name: linked}"}
        httpx.post(f"{server.url}/sync_train_config", json=config)
        reply = httpx.post(f"{server.url}/start_engine").json()
        assert not reply["success"] and "is outside of the run directory" in reply["error"]
        assert list((tmp_path / "elsewhere").iterdir()) == []
        start(client, experiment_name="a")
        assert client.get_engine_status()[0] == "ENGINE.ROLLING"


def make_model(folder: Path) -> None:
    """Copy the demo model into a folder, as a model of its own."""
    shutil.copytree(DEMO_MODEL_DIR, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": folder.name}))


def change_weights(folder: Path) -> None:
    """Change the weights of a model slightly, and nothing else."""
    for file in folder.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        content[start::4] = bytes(byte ^ 0xFF for byte in content[start::4])
        file.write_bytes(content)


def test_a_job_that_names_another_model_below_models_dir_trains_it_in_a_run_of_its_own(
    processes: Processes, tmp_path: Path
) -> None:
    for name in ("models/one", "models/two", "outside"):
        make_model(tmp_path / name)
    shutil.copytree(tmp_path / "models/one", tmp_path / "models/tuned")
    change_weights(tmp_path / "models/tuned")
    flags = ("--backend", "embedded", "--models-dir", str(tmp_path / "models"))
    server = processes.server(*flags)

    def model_and_run() -> tuple[str, str]:
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        return model["id"], current_run(client)

    with SwarmClient(server.url) as client:
        start(client, experiment_name="a", model="one")
        play(client, 0.0, 1.0, 0.0)
        assert model_and_run() == ("one", ".")
        start(client, experiment_name="a", model="two")
        name, folder = model_and_run()
        assert name == "two" and folder.startswith("runs/a@")
        assert set(status(client)["waiting"].values()) == {0}
        restart(server)
        wait_until(lambda: status(client)["engine_status"] == "ENGINE.ROLLING", 60)
        assert model_and_run() == ("two", folder)
        start(client, experiment_name="a", model="tuned")
        name, tuned = model_and_run()
        assert name == "tuned" and tuned.startswith("runs/a@") and tuned != folder
        client.stop_engine()
        client.sync_train_config(TrainJob(model=str(tmp_path / "outside")))
        with pytest.raises(SwarmError, match="is not a folder below the server's --models-dir"):
            client.start_engine()
