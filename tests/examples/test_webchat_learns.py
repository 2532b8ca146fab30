"""The web chat example, run with the README's commands: the demo model learns to add."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Processes, wait_until
from tests.examples.webchat_app import ROOT, running_webchat

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(400)]

CONFIG = ROOT / "examples/webchat/fakevllm.toml"
HOOKS = ROOT / "examples/webchat/hooks"
CHATS = 220
STEPS = 40
"""Minimum number of steps that the run's chats train."""


def curve(tmp_path: Path, control: str) -> list[float]:
    """Run the example and return the policy mean of each step."""
    tmp_path.mkdir()
    config = tmp_path / "fakevllm.toml"
    text = CONFIG.read_text().replace("examples/webchat/hooks", str(HOOKS))
    config.write_text(f'{text}control = "{control}"\n')
    with Processes(tmp_path) as started:
        server = started.server("--backend", "embedded", "--model", "demo", "--seed", "0")
        proxy = started.proxy(server, "--config", str(config))
        with running_webchat(proxy.url, tmp_path) as url:
            users = [sys.executable, "-m", "examples.webchat.mock_user_request", "--app", url]
            users += ["--chats", str(CHATS)]
            played = subprocess.run(users, cwd=ROOT, capture_output=True, text=True, check=True)
        print(control, played.stdout)

        def stats() -> dict[str, Any]:
            return httpx.get(f"{proxy.url}/fakevllm/stats").json()

        wait_until(lambda: len(stats()["curve"]) > STEPS, 60, lambda: json.dumps(stats()))
        means = [row["policy_mean"] for row in stats()["curve"]]
    print(control, [round(mean, 2) for mean in means])
    return means


def test_the_demo_model_learns_from_chats_and_learns_nothing_without_updates(
    tmp_path: Path,
) -> None:
    learns = curve(tmp_path / "learns", "none")
    frozen = curve(tmp_path / "frozen", "frozen")
    rise = fmean(learns[STEPS - 8 : STEPS]) - fmean(learns[:8])
    drift = fmean(frozen[STEPS - 8 : STEPS]) - fmean(frozen[:8])
    assert rise > 0.2 and abs(drift) < 0.12
