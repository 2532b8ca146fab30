"""A test of a client that is killed, edited and restarted in the middle of a run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fakevllm import SwarmClient
from tests.e2e.processes import Process, Processes, wait_until

CLIENT = Path(__file__).parent / "restarted_client.py"
WAIT_S = 40.0
pytestmark = [pytest.mark.slow]


class Script:
    """The client's program file and log, and a method that runs the program."""

    def __init__(self, folder: Path, server: Process) -> None:
        self._file, self._server = folder / "client.py", server
        self._log = folder / "client.log"

    def run_until(self, edit: str, condition: Callable[[str], bool]) -> float:
        """Run the program with this edit until its log fulfils the condition, and kill it.

        Returns the seconds from the start until then.
        """
        self._file.write_text(CLIENT.read_text().replace("# EDITED_HERE", edit))
        with self._log.open("w") as log:
            started_at = time.monotonic()
            command = [sys.executable, str(self._file), self._server.url]
            running = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(lambda: condition(self._log.read_text()), WAIT_S, self._log.read_text)
            return time.monotonic() - started_at
        finally:
            running.kill()
            running.wait()


def test_a_client_continues_after_it_was_killed_edited_and_restarted(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    script = Script(tmp_path, server)
    with SwarmClient(server.url) as watching:

        def trains(log: str) -> bool:
            return "ended" in log and watching.get_global_step() >= goal

        goal = 3
        script.run_until("pass", trains)
        broken = 'raise RuntimeError("the edit is wrong")'
        to_traceback = script.run_until(
            broken, lambda log: "RuntimeError: the edit is wrong" in log
        )
        to_episode = script.run_until("pass", lambda log: "ended" in log)
        print(f"{to_traceback:.1f} s to the traceback, {to_episode:.1f} s to the first episode")
        goal = watching.get_global_step() + 2
        script.run_until("pass", trains)
