"""A client that is killed, edited and started again in the middle of a run."""

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
    """The client's file, and one life of it after the other."""

    def __init__(self, folder: Path, server: Process) -> None:
        self._file, self._server = folder / "client.py", server
        self._log = folder / "client.log"

    def life(self, edit: str, is_there: Callable[[str], bool]) -> float:
        """Started with this in it, and killed once its log `is_there`; seconds from start to
        then."""
        self._file.write_text(CLIENT.read_text().replace("# EDITED_HERE", edit))
        with self._log.open("w") as log:
            begun = time.monotonic()
            command = [sys.executable, str(self._file), self._server.url]
            running = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(lambda: is_there(self._log.read_text()), WAIT_S, self._log.read_text)
            return time.monotonic() - begun
        finally:
            running.kill()
            running.wait()


def test_a_client_that_is_killed_edited_and_started_again_goes_on(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    script = Script(tmp_path, server)
    with SwarmClient(server.url) as watching:

        def trains(told: str) -> bool:
            return "ended" in told and watching.get_global_step() >= goal

        goal = 3
        script.life("pass", trains)
        broken = 'raise RuntimeError("the edit is wrong")'
        to_traceback = script.life(broken, lambda told: "RuntimeError: the edit is wrong" in told)
        to_episode = script.life("pass", lambda told: "ended" in told)
        print(f"{to_traceback:.1f} s to the traceback, {to_episode:.1f} s to the first episode")
        goal = watching.get_global_step() + 2
        script.life("pass", trains)
