"""Ctrl-C during an example. Like a terminal, the test signals all processes of the example."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from fakevllm import SwarmClient
from tests.e2e.processes import Processes, wait_until
from tests.examples.webchat_app import ROOT

STOP_TIMEOUT_S = 10.0
EXAMPLES = {
    "cocktail.run": ["--num-repeat", "2", "--steps", "1000"],
    "multi_model.run": ["--num-repeat", "2", "--steps", "1000"],
    "werewolves.train": ["--small", "--free", "--games", "2", "--batch-size", "2"],
}


def read_until(lines: IO[str], prefix: str) -> str:
    """Return the lines up to the first one with this prefix."""
    text = ""
    for line in lines:
        text += line
        if line.startswith(prefix):
            break
    return text


def has_ended(process: subprocess.Popen[str]) -> bool:
    """Return whether the process and all its child processes have ended."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_ctrl_c_ends_an_example_at_once_and_leaves_no_claim(tmp_path: Path, name: str) -> None:
    with Processes(tmp_path) as started:
        servers = [started.server("--backend", "fake", folder=one) for one in ("first", "second")]
        places = {"cocktail.run": ["--server"], "werewolves.train": ["--swarm-url"]}
        flags = places.get(name, ["--planner", "--executor"])
        where = [
            part for flag, one in zip(flags, servers, strict=False) for part in (flag, one.url)
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", f"examples.{name}", *EXAMPLES[name], *where],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout:
            output = read_until(process.stdout, "step 2")
            os.killpg(process.pid, signal.SIGINT)
            output += process.stdout.read()
        wait_until(lambda: has_ended(process), STOP_TIMEOUT_S, "its processes are gone")
        assert process.returncode == 130, output
        assert "Traceback" not in output and "failed" not in output, output
        for one in servers[: len(flags)]:
            with SwarmClient(one.url, verbose=False) as client:
                wait_until(
                    lambda: not client.get_episode_buffer(), STOP_TIMEOUT_S, "no claim is left"
                )
