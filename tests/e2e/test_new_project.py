"""A project that `fakevllm init` has written trains and measures the demo's model with its own
commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from fakevllm.scaffold.project_files import NEXT_COMMANDS
from tests.e2e.ledgers import rows_of_file
from tests.e2e.processes import Process, Processes, free_port, wait_until
from tests.e2e.test_commands import run

MEASURE = "fakevllm eval"
STEP_TIMEOUT_S = 120.0


def test_the_commands_of_a_written_readme_measure_the_model_and_train_a_step(
    processes: Processes,
) -> None:
    project = processes.folder / "project"
    done = run(processes.folder, "-m", "fakevllm", "init", str(project), "--yes")
    assert done.returncode == 0, done.stderr
    readme = (project / "README.md").read_text()
    assert all(f"    {command}\n" in readme for command in (*NEXT_COMMANDS, MEASURE))
    proxy_port = free_port()
    set_ports(project / "fakevllm.toml", free_port(), proxy_port)
    up_command, user_command = map(shlex.split, NEXT_COMMANDS)
    up = Process("up", ["-m", *up_command], proxy_port, project)
    processes.adopt(up).wait_until_healthy()
    users = run(project, *user_command[1:], "--epochs", "1", timeout_s=STEP_TIMEOUT_S)
    assert users.returncode == 0, users.stdout + users.stderr
    ledger = project / "runs/proxy/ledger.sqlite"

    def has_trained() -> bool:
        query = "select count(*) from groups where state = 'trained' and step >= 1"
        return rows_of_file(ledger, query)[0][0] > 0

    wait_until(has_trained, STEP_TIMEOUT_S, "a trained group")
    # The rows are held out although the proxy has trained the other rows of the same form.
    flags = ["--json", "eval.json"]
    measured = run(project, "-m", *shlex.split(MEASURE), *flags, timeout_s=STEP_TIMEOUT_S)
    assert measured.returncode == 0, measured.stdout + measured.stderr
    assert "held_out.jsonl: 16 rows, 4 samples each" in measured.stdout
    (version,) = json.loads((project / "eval.json").read_text())["versions"]
    assert version["rows"] == 16 and 0.2 < version["mean"] <= 1.0
    query = "select count(*) from groups where kind = 'eval' and state != 'served'"
    assert rows_of_file(ledger, query)[0][0] == 0


def set_ports(settings: Path, server_port: int, proxy_port: int) -> None:
    """Set the ports of server and proxy in a written fakevllm.toml, which names none. The console
    gets any free port."""
    text = settings.read_text()
    for table, port in (("[server]", server_port), ("[proxy]", proxy_port)):
        assert text.count(f"\n{table}\n") == 1
        text = text.replace(f"\n{table}\n", f"\n{table}\nport = {port}\n")
    settings.write_text(f"{text}\n[console]\nport = 0\n")
