"""The commands of each skill work when a coding assistant runs them in order in a fresh folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from fakevllm.scaffold.skills import skill_names
from tests.e2e.processes import free_port
from tests.e2e.test_new_project import set_ports
from tests.proxy.scaffold.skill_blocks import shell_blocks, skill_text

SKILL_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0
PROXY_PORT, SERVER_PORT = "8000", "10086"
"""Ports that the skills name. They are the defaults."""
EVIDENCE = {
    "diagnose-a-run": r"new .* of 48 \(\d+ %\)",
    "write-a-passive-client": r"groups +│.* [1-9]\d* trained",
    "write-a-reward-hook": r"The new hooks \w+ took over from \w+: tried on 48 groups",
    "write-a-swarm-client": r"step 3: mean reward 0\.\d\d",
}
"""Pattern in the output of each skill, which shows that its commands had an effect."""


class Shells:
    """Runs each block of commands in a shell of its own, as coding assistants do. A block begins in
    the folder in which the previous one ended, but has no variables of the previous one.

    At the end of the `with` block, everything that the commands have started is stopped.
    """

    def __init__(self, folder: Path) -> None:
        self._cwd = folder / "fresh"
        self._cwd.mkdir()
        self._cwd_file = folder / "cwd"
        self._output = folder / "output.txt"
        self._ports = {PROXY_PORT: free_port(), SERVER_PORT: free_port()}
        self._sessions: list[int] = []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = os.environ | {"PATH": path}
        self._deadline = time.monotonic() + SKILL_TIMEOUT_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if (self._cwd / "fakevllm.toml").exists():
            command = [sys.executable, "-m", "fakevllm", "down"]
            subprocess.run(
                command, cwd=self._cwd, capture_output=True, timeout=STOP_TIMEOUT_S, check=False
            )
        for session in self._sessions:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)

    def run(self, block: str) -> str:
        """Run a block with free ports in place of those that it names, and return its output."""
        script = f"{self._with_free_ports(block)}\npwd >'{self._cwd_file}'\n"
        # The output is a file. Programs in the background would keep a pipe open.
        with self._output.open("wb") as output:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=self._cwd,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._sessions.append(shell.pid)
        with suppress(subprocess.TimeoutExpired):
            shell.wait(self._deadline - time.monotonic())
        text = self._output.read_text(errors="replace")
        assert shell.returncode == 0, f"exit code {shell.returncode} of:\n{block}\n{text}"
        self._cwd = Path(self._cwd_file.read_text().strip())
        self._move_project_to_free_ports()
        return text

    def _with_free_ports(self, text: str) -> str:
        for port, free in self._ports.items():
            text = re.sub(rf"\b{port}\b", str(free), text)
        return text

    def _move_project_to_free_ports(self) -> None:
        settings = self._cwd / "fakevllm.toml"
        if settings.exists() and "port = " not in settings.read_text():
            set_ports(settings, self._ports[SERVER_PORT], self._ports[PROXY_PORT])
            for file in (self._cwd / "app").iterdir():
                file.write_text(self._with_free_ports(file.read_text()))


@pytest.mark.parametrize("name", skill_names())
def test_every_command_of_a_skill_works(name: str, tmp_path: Path) -> None:
    blocks = shell_blocks(skill_text(name))
    with Shells(tmp_path) as shells:
        output = "".join(shells.run(block) for block in blocks)
    assert len(blocks) >= 5 and re.search(EVIDENCE[name], output), output
