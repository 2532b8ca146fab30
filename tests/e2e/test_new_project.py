"""A project that `fakevllm init` has written trains the demo's model with its own commands."""

from __future__ import annotations

import contextlib
import shlex
import sqlite3
from pathlib import Path

from fakevllm.scaffold.answers import Answers
from fakevllm.scaffold.project_files import next_commands
from tests.e2e.processes import Process, Processes, free_port, wait_until
from tests.e2e.test_commands import run

STEP_TIMEOUT_S = 120.0
MODULES = {"fakevllm-server": "fakevllm_server", "fakevllm": "fakevllm"}


def test_the_commands_of_a_written_readme_train_a_step(processes: Processes) -> None:
    project = processes.folder / "project"
    done = run(processes.folder, "-m", "fakevllm", "init", str(project), "--yes")
    assert done.returncode == 0, done.stderr
    commands = next_commands(Answers("openai", "demo", "exact"))
    readme = (project / "README.md").read_text()
    assert all(f"    {command}\n" in readme for command in commands)
    server_command, proxy_command, user_command = map(shlex.split, commands)
    server = start(processes, "server", server_command, project, [])
    proxy = start(processes, "proxy", proxy_command, project, ["--swarm", server.url])
    proxy.wait_until_healthy()
    users = run(
        project, *user_command[1:], "--epochs", "1", "--url", proxy.url, timeout_s=STEP_TIMEOUT_S
    )
    assert users.returncode == 0, users.stdout + users.stderr

    def has_trained() -> bool:
        with contextlib.closing(sqlite3.connect(project / "runs/proxy/ledger.sqlite")) as ledger:
            query = "select count(*) from groups where state = 'trained' and step >= 1"
            return ledger.execute(query).fetchone()[0] > 0

    wait_until(has_trained, STEP_TIMEOUT_S, "a trained group")


def start(
    processes: Processes, name: str, command: list[str], project: Path, flags: list[str]
) -> Process:
    """Start a program of the README on a free port, in the project's folder."""
    port = free_port()
    module = ["-m", MODULES[command[0]], *command[1:]]
    process = Process(name, [*module, *flags, "--port", str(port)], port, project)
    processes.adopt(process)
    return process.wait_until_healthy()
