"""The cocktail example on the fake engine, run with the README's commands."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.cocktail.report import trained_shares
from examples.cocktail.tasks import MIXES
from examples.run_log import trained_steps
from fakevllm import SwarmClient
from fakevllm_adapters.protocol.swarm import LogEntry, TrainedGroup
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Processes, wait_until
from tests.examples.webchat_app import ROOT

STEPS = 20


@pytest.mark.live
def test_twenty_steps_have_the_requested_mix(tmp_path: Path) -> None:
    with Processes(tmp_path) as started:
        server = started.server("--backend", "fake")
        command = [sys.executable, "-m", "examples.cocktail.run", "--server", server.url]
        command += ["--num-repeat", "2", "--steps", str(STEPS)]
        played = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        shares = trained_shares(trained_steps(server.url)[:STEPS])
    print(played.stdout)
    assert "20 steps" in played.stdout
    for name, mix in MIXES.items():
        assert shares[name] == pytest.approx(mix.share, abs=0.03)


@pytest.mark.slow
def test_a_small_cocktail_is_trained_and_reported(tmp_path: Path) -> None:
    with Processes(tmp_path) as started:
        server = started.server("--backend", "fake")
        command = ["-m", "examples.cocktail.run", "--server", server.url]
        command += ["--num-repeat", "2", "--steps", "2"]
        played = PRELOADED_PYTHON.run(command, ROOT)
    assert played.returncode == 0, played.stderr
    for name in MIXES:
        assert f"{name}: 2 steps are trained" in played.stdout


@pytest.mark.slow
def test_a_cocktail_ends_with_a_message_if_its_engine_is_stopped(tmp_path: Path) -> None:
    with Processes(tmp_path) as started:
        server = started.server("--backend", "fake")
        command = [sys.executable, "-m", "examples.cocktail.run", "--server", server.url]
        command += ["--num-repeat", "2", "--steps", "1000"]
        with (
            subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as played,
            SwarmClient(server.url) as client,
        ):
            try:
                wait_until(lambda: client.get_global_step() >= 2, 200, "a step of the cocktail")
                client.stop_engine()
                _, errors = played.communicate(timeout=30)
            finally:
                played.send_signal(signal.SIGINT)  # the script stops its clients
    assert played.returncode == 1
    for name in MIXES:
        assert f"{name}: the engine was stopped" in errors


def test_the_report_counts_groups_by_the_mix_in_their_task_id() -> None:
    ids = ["task:math-a-0#e1", "task:math-a-1#e2", "task:words-b-0#e3", "task:format-c-0#e4"]
    groups = [TrainedGroup(group_id=one, siblings=[0]) for one in ids]
    step = LogEntry(seq=1, kind="step", groups=groups)
    assert trained_shares([step]) == {"math": 0.5, "words": 0.25, "format": 0.25}
