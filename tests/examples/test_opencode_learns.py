"""The opencode example, run with the README's commands: the model learns to add.

The test takes minutes of two cores, most of them for opencode. Only `just long` runs it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.opencode_sessions import make_model, run
from tests.e2e.npm_package import install_opencode

TIMEOUT_S = 1800
"""Seconds. Two busy cores needed more than 900."""
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]

STEPS, SESSIONS = 14, 50
FROZEN_STEPS, FROZEN_SESSIONS = 5, 20
"""FROZEN_SESSIONS sessions train at least FROZEN_STEPS steps."""
LAST = 20
"""Number of requests at the end of a run. The mean reward of these requests (160 samples) is
compared."""


def test_opencodes_model_learns_from_its_users_and_learns_nothing_without_updates(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    opencode = str(install_opencode(request.config))
    model = make_model(tmp_path / "agent-tiny", opencode)

    def calls(control: str, steps: int, sessions: int) -> list[float]:
        folder = tmp_path / control
        done = run(folder, model, opencode, seed=0, control=control, sessions=sessions, steps=steps)
        print(
            control,
            f"{done.wall_s:.0f} s",
            done.users_summary,
            done.policy_mean,
            done.calls,
            sep="\n",
        )
        return done.calls

    with ThreadPoolExecutor() as pool:  # opencode is idle half of the time
        learning = pool.submit(calls, "none", STEPS, SESSIONS)
        resting = pool.submit(calls, "frozen", FROZEN_STEPS, FROZEN_SESSIONS)
        learnt, frozen = learning.result(), resting.result()
    assert 0.1 < fmean(frozen) < 0.75, "it must add badly at first, and not always"
    assert abs(fmean(frozen[-LAST:]) - fmean(frozen)) < 0.15
    assert fmean(learnt[-LAST:]) - fmean(frozen) >= 0.15
