"""The figures of the two benchmarks about releases, from numbers instead of runs."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.feedback_latency import HEADER, Answer, Latencies, latencies
from benchmarks.planted_steps import HEADER as PLANTED_HEADER
from benchmarks.planted_steps import PlantedRun, summary, training_share

ANSWERS = [Answer(1.0, 4, "a"), Answer(2.0, 6, "b"), Answer(3.0, 5, "c"), Answer(9.0, 7, "d")]


def test_the_first_later_answer_of_a_new_enough_version_counts() -> None:
    measured = latencies("ungated", [(0.5, 5), (2.5, 5), (1.0, 4)], ANSWERS)

    assert measured.latencies_s == [1.5, 0.5, 1.0]


def test_feedback_without_a_later_answer_counts_as_longer_than_all_others() -> None:
    measured = latencies("ungated", [(0.5, 8), (8.0, 7)], ANSWERS)

    assert measured.latencies_s == [math.inf, 1.0]
    assert measured.cells()[2:] == ["1.0", *["not before the end"] * 2, "2", "1"]


def test_the_row_shows_median_and_ninetieth_percentile() -> None:
    seconds = [float(number) for number in range(1, 11)]
    row = Latencies("ungated", None, [*seconds, math.inf]).cells()

    assert dict(zip(HEADER, row, strict=True)) == {
        "demo": "ungated",
        "answers of the arm": "all",
        "p50, s": "6.0",
        "p90, s": "10.0",
        "longest, s": "not before the end",
        "feedbacks": "11",
        "without an answer before the end": "1",
    }


def planted_run(seed: int, sessions: int | None, num_training: int = 50) -> PlantedRun:
    planted: dict[str, Any] = {
        "rejected": None if sessions is None else 31,
        "restored": None if sessions is None else 25,
        "sessions_until_return": sessions,
        "released_arm": {"before": 0.8, "since": 0.9},
        "claims": {"training went back": sessions is not None},
    }
    outcome = {"planted": planted, "after_released": 0.9}
    return PlantedRun(seed, outcome, 100, num_training, 60.0)


def test_a_run_fails_if_a_claim_does_not_hold() -> None:
    assert planted_run(0, 40).failed == []
    assert planted_run(0, None).failed == ["training went back"]


def test_the_share_of_the_training_arm_is_that_of_all_runs_together() -> None:
    assert training_share([planted_run(0, 40, 40), planted_run(1, 40, 56)]) == 0.48


def test_the_summary_has_the_median_and_the_largest_number_of_sessions() -> None:
    runs = [planted_run(0, 40), planted_run(1, 90), planted_run(2, None), planted_run(3, 60)]

    assert summary(runs) == (
        "Training went back in 3 of 4 runs, after 60 sessions in the median and 90 at most. "
        "Until then, 50.0% of all answers were the training arm's."
    )


def test_the_row_of_a_planted_run_has_a_cell_for_each_column() -> None:
    for sessions in (40, None):
        assert len(planted_run(0, sessions).cells()) == len(PLANTED_HEADER)
