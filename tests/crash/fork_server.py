"""A fork server: one process imports the server, and forks a child for each server process.

Importing the server takes a second, and a server process runs for a third of a second. A crash
point still ends a real process.

    python -m crash.fork_server crash.server_process
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from crash.power_cut import PowerCut

from fakevllm_server.types import crash_points

LIMIT_S = 40
"""Seconds after which a process that hangs is ended by SIGALRM.

Its exit status differs from the status of a crash."""
LOG, LABELS = "server_process.log", "labels.txt"


class ForkServer:
    """A context manager that runs the fork server and closes it on exit."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "crash.fork_server", module],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, run_dir: Path, crash_at: str | None = None, **options: Any) -> int:
        """Run one server process and return its exit status.

        `options` are passed to the module's `main`.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        run_dir.mkdir(exist_ok=True)
        command = {"run_dir": str(run_dir), "crash_at": crash_at, "options": options}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def run_to_crash(self, run_dir: Path, label: str, **options: Any) -> None:
        """Run a server process, and check that it ended at the crash point."""
        status = self.run(run_dir, label, **options)
        assert status == crash_points.EXIT_CODE, f"{label}: {_describe(run_dir, status)}"

    def run_to_end(self, run_dir: Path, **options: Any) -> None:
        """Run a server process, and check that it reached the end of the script."""
        status = self.run(run_dir, **options)
        assert status == 0, _describe(run_dir, status)


def passed_labels(run_dir: Path) -> list[str]:
    """Return the labels that the last process without a crash passed."""
    return (run_dir / LABELS).read_text().splitlines()


def _describe(run_dir: Path, status: int) -> str:
    return f"ended with {status}\n" + (run_dir / LOG).read_text()[-4000:]


def _serve(module: str) -> None:
    main = importlib.import_module(module).main
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run_child(main, json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)  # an interpreter that has imported torch takes seconds to exit


def _run_child(main: Any, command: dict[str, Any]) -> None:
    """Run the module's `main` in the forked child, and end the child."""
    run_dir = Path(command["run_dir"])
    signal.alarm(LIMIT_S)
    log = os.open(run_dir / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    passed: list[str] = []
    power_cut = PowerCut(run_dir / "checkpoints")
    power_cut.watch()
    crash_at = command["crash_at"]
    crash_points.on_pass = (
        passed.append if crash_at is None else crash_points.exit_at(crash_at, power_cut.apply)
    )
    try:
        main(run_dir, **command["options"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    (run_dir / LABELS).write_text("\n".join(passed))
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
