"""Ctrl-C in the middle of an example, as a terminal sends it: to all its processes."""

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
from tests.examples.webchats import ROOT

AT_ONCE_S = 10.0
EXAMPLES = {
    "cocktail.run": ["--num-repeat", "2", "--steps", "1000"],
    "multi_model.run": ["--num-repeat", "2", "--steps", "1000"],
    "werewolves.train": ["--small", "--free", "--games", "2", "--batch-size", "2"],
}


def until(lines: IO[str], beginning: str) -> str:
    """What comes until a line begins so."""
    said = ""
    for line in lines:
        said += line
        if line.startswith(beginning):
            break
    return said


def ended(process: subprocess.Popen[str]) -> bool:
    """With all that it has started."""
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
            said = until(process.stdout, "step 2")
            os.killpg(process.pid, signal.SIGINT)
            said += process.stdout.read()
        wait_until(lambda: ended(process), AT_ONCE_S, "its processes are gone")
        assert process.returncode == 130, said
        assert "Traceback" not in said and "failed" not in said, said
        for one in servers[: len(flags)]:
            with SwarmClient(one.url, verbose=False) as client:
                wait_until(lambda: not client.get_episode_buffer(), AT_ONCE_S, "no claim is left")
