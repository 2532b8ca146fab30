"""The math example, run with the README's command: the demo model learns to use the calculator."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import math_example

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NUM_STEPS = 20


def test_the_demo_model_learns_to_call_the_calculator_and_learns_nothing_without_updates(
    tmp_path: Path,
) -> None:
    learns, frozen = (
        math_example.run(tmp_path / control, 0, control) for control in ("none", "frozen")
    )
    assert len(learns.policy_mean) == len(frozen.policy_mean) == NUM_STEPS
    assert learns.end - learns.start > 0.12 and learns.after > 0.9
    assert abs(frozen.end - frozen.start) < 0.1 and frozen.after < 0.85
