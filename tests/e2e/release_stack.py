"""Helpers for tests of arms and releases: the proxy's settings in front of the fake engine, and
queries of the state of the gate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import rows
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
GAMEABLE = """
def on_compute_relative_reward(siblings, answers):
    wanted = "yes" if "held-out" in siblings[0].messages[-1]["content"] else "no"
    return [float((answer["content"] or "").startswith(wanted)) for answer in answers]
"""
"""A hook whose rewards of apps' requests can rise while the answers to the held-out rows get worse.
"""


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


class Talk:
    """An app that opens one session after another."""

    def __init__(self, proxy: Process) -> None:
        self.proxy = proxy
        self.number = 0

    def ask(self) -> None:
        self.number += 1
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": f"Question {self.number}?"}],
        }
        reply = httpx.post(f"{self.proxy.url}/v1/chat/completions", json=body, timeout=30)
        assert reply.status_code == 200, reply.text

    def ask_until_answered_by_the_released_arm(self) -> None:
        query = "SELECT COUNT(*) FROM groups WHERE arm = 'released' AND reason = 'other_arm'"
        (num_before,) = rows(self.proxy, query)[0]

        def answered() -> bool:
            self.ask()
            return rows(self.proxy, query)[0][0] > num_before

        wait_until(answered, 30.0, "an answer of the released version")

    def ask_until_decided(self, server: Process, decision: str, after: int = 0) -> dict[str, Any]:
        """Ask questions until the history has a record with this decision and a number above
        `after`. Return the first such record."""

        def records() -> list[dict[str, Any]]:
            return [
                one
                for one in history(server)
                if one["decision"] == decision and one["number"] > after
            ]

        def decided() -> bool:
            self.ask()
            return bool(records())

        wait_until(decided, 120.0, f"a version that is {decision}")
        return records()[0]
