"""What a learning curve says in averages and in a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakevllm.console.curve_summary import averages, both_ends, finished_points
from fakevllm.ledger.curve_reads import CurvePoint


def curve(*means: float | None, groups: int = 8) -> list[CurvePoint]:
    return [
        CurvePoint(step, step, groups, mean, None, None, 0) for step, mean in enumerate(means, 1)
    ]


def test_a_step_that_is_still_collected_is_left_out() -> None:
    points = curve(0.1, 0.2, 0.3)
    assert finished_points(points, "run", {"run_id": "run", "global_step": 3}) == points[:2]
    assert finished_points(points, "run", {"run_id": "run", "global_step": 4}) == points
    assert finished_points(points, "run", {"run_id": "other", "global_step": 3}) == points
    assert finished_points(points, "run", None) == points
    assert finished_points([], "run", {"run_id": "run", "global_step": 1}) == []


def test_an_average_is_weighted_by_groups_and_ends_at_a_change() -> None:
    points = curve(0.0, 1.0, None, 0.4)
    points[1] = replace(points[1], groups=24)
    points[3] = replace(points[3], changed="the hooks changed")
    assert averages(points) == [0.0, 0.75, 0.75, pytest.approx(0.4)]
    assert averages(curve(*[0.0] * 5, *[1.0] * 10))[-1] == 1.0


def test_both_ends_are_compared_after_the_last_change() -> None:
    points = curve(0.9, 0.1, 0.2, 0.3, 0.6)
    points[1] = replace(points[1], changed="the job changed")
    assert both_ends(points) == (
        "The mean reward of all sampled answers was 0.150 in steps 2 to 3, "
        "and 0.450 in steps 4 to 5."
    )
    assert both_ends(curve(0.5)) is None and both_ends([]) is None
    assert both_ends(curve(None, None)) is None
