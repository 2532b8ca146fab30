"""Tests of the comparison of the demo with and without training steps beside episodes."""

from __future__ import annotations

import pytest

from benchmarks.async_steps import Speed, create_curves, create_table
from benchmarks.demo_learning import DemoRun

FIRST = {"tokens_trained": 999.0, "staleness_mean": 9.0, "staleness_max": 9.0}


def step(seconds: float, waits: float, age: float) -> dict[str, float]:
    return {
        "step_seconds": seconds,
        "trainer_wait_share": waits,
        "tokens_trained": 100.0,
        "staleness_mean": age / 2,
        "staleness_max": age,
    }


def test_the_speed_is_measured_from_the_end_of_the_first_step() -> None:
    speed = Speed.of_steps([FIRST, step(1.0, 0.5, 2.0), step(3.0, 0.1, 0.0)])
    assert (speed.groups_per_s, speed.tokens_per_s) == (4.0, 50.0)
    assert speed.wait_share == pytest.approx(0.2)
    assert (speed.staleness_mean, speed.staleness_max) == (0.5, 2.0)


def test_the_tables_have_a_row_for_each_run_and_a_column_for_each_setting() -> None:
    run = DemoRun(0, "none", [0.5] * 15 + [0.9] * 10, 60.0, 0.52, 0.96, {"trained": 200})
    runs = {0: [(run, Speed(4.0, 50.0, 0.5, 0, 0))], 2: [(run, Speed(6.0, 75.0, 0.01, 1, 2))]}
    header, rows = create_table(runs)
    waits = [dict(zip(header, row, strict=True))["trainer waits"] for row in rows]
    assert waits == ["50%", "1%"]
    assert create_curves(runs) == (
        ["steps", "async_steps 0", "async_steps 2"],
        [["1 to 15", "0.500", "0.500"], ["16 to 25", "0.900", "0.900"]],
    )
