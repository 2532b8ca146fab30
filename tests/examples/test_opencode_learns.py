"""opencode's README by its commands, in short: the npm binary's sessions teach its model to add.

Minutes of two cores, most of them opencode's: `just long` runs it, the gate does not.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.opencode_sessions import make_model, run
from tests.e2e.npm_opencode import installed_opencode

TIMEOUT_S = 1800
"""Two cores with much else to do needed more than 900."""
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]

STEPS, SESSIONS = 14, 50
FROZEN_STEPS, FROZEN_SESSIONS = 5, 20
"""So many steps come of so many sessions, at least."""
LAST = 20
"""Answers to questions at the end of a run: 160 samples."""


def test_opencodes_users_teach_its_model_and_without_updates_nothing_is_learnt(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    opencode = str(installed_opencode(request.config))
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

    with ThreadPoolExecutor() as both:  # opencode is idle half of the time
        learning = both.submit(calls, "none", STEPS, SESSIONS)
        resting = both.submit(calls, "frozen", FROZEN_STEPS, FROZEN_SESSIONS)
        learnt, frozen = learning.result(), resting.result()
    assert 0.1 < fmean(frozen) < 0.75, "it must add badly at first, and not always"
    assert abs(fmean(frozen[-LAST:]) - fmean(frozen)) < 0.15
    assert fmean(learnt[-LAST:]) - fmean(frozen) >= 0.15
