"""What tests of arms and releases share: the proxy's settings in front of the fake engine, and
questions about the state of the gate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Process, wait_until

JOB = """
[job]
batch_size = 2
lr = 2.0
num_repeat = 4
"""
"""A job that moves the fake engine far with each step."""
HELD_OUT = [f"Is the held-out row number {number} answered with yes?" for number in range(6)]
ARMS_LIMIT_S = 30.0


def proxy_flags(folder: Path, sections: str, hook: str = PREFER_YES, job: str = JOB) -> list[str]:
    """Write the settings and the hooks, and return the proxy's flags.

    `sections` are those of the configuration after the job.
    """
    config = folder / "fakevllm.toml"
    config.write_text(f"{job}{sections}")
    return ["--config", str(config), "--hooks", str(write_hooks(folder / "hooks", hook))]


def write_held_out(folder: Path, texts: Sequence[str] = HELD_OUT) -> Path:
    """Write held-out rows, and return their file."""
    file = folder / "held_out.jsonl"
    file.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    return file


def stats(proxy: Process) -> dict[str, Any]:
    return httpx.get(f"{proxy.url}/fakevllm/stats", timeout=30).json()


def wait_for_arms(proxy: Process) -> None:
    """Wait until the engine holds the version of each arm."""
    wait_until(lambda: not stats(proxy)["arms"]["trouble"], ARMS_LIMIT_S, "the arms' versions")


def release(url: str, *arguments: str) -> tuple[int, str]:
    """Run `fakevllm release` for the server at `url`, and return its exit code and its output."""
    command = ["-m", "fakevllm", "release", *arguments, "--swarm", url]
    result = PRELOADED_PYTHON.run(command, Path.cwd(), timeout_s=120)
    return result.returncode, result.stdout + result.stderr


def history(server: Process) -> list[dict[str, Any]]:
    """Return all decisions, oldest first."""
    return httpx.get(f"{server.url}/releases", timeout=30).json()["records"]
