"""The figures of a retrain: effective sample size, staleness, and the limit."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fakevllm.errors import UserError
from fakevllm.ledger.broken_rows import BrokenGroup
from fakevllm.retraining.report import EffectiveSampleSize, RetrainReport, Staleness, render
from fakevllm.retraining.sample_size_limit import MAX_LOW, SampleSizeLimit

WEIGHTS = st.lists(st.floats(0.01, 2.0), min_size=1)


def metrics_of(weights: list[float]) -> dict[str, float]:
    """Return the metrics of a step as the server computes them."""
    total, squares = math.fsum(weights), math.fsum(weight**2 for weight in weights)
    num = len(weights)
    return {
        "logged_tokens": num,
        "logged_weight": total / num,
        "logged_ess": total**2 / (num * squares),
    }


@given(st.lists(WEIGHTS, min_size=1))
def test_the_effective_sample_size_of_all_steps_is_that_of_all_their_tokens(
    steps: list[list[float]],
) -> None:
    total = EffectiveSampleSize()
    for weights in steps:
        total.add(metrics_of(weights))
    whole = metrics_of([weight for weights in steps for weight in weights])
    assert total.share == pytest.approx(whole["logged_ess"])
    assert total.lowest == min(metrics_of(weights)["logged_ess"] for weights in steps)


def test_a_step_without_logged_tokens_does_not_count() -> None:
    total = EffectiveSampleSize()
    total.add({"reward_mean": 1.0})
    assert (total.share, total.lowest) == (None, None)
    total.add({"logged_tokens": 2.0, "logged_weight": 0.0, "logged_ess": 0.0})
    assert (total.share, total.lowest) == (0.0, 0.0)


def test_staleness_is_the_distance_from_the_starting_version_in_the_same_run() -> None:
    staleness = Staleness(10, "run")
    staleness.add("run", [10])
    staleness.add("run", [4, 6])
    staleness.add("run", [13])
    staleness.add("other", [10])
    staleness.add("run", [])
    assert staleness.mean == pytest.approx((0 + 5 + 3) / 3)
    assert (staleness.first, staleness.last, staleness.largest) == (4, 13, 6)
    assert staleness.num_of_other_runs == 2


@given(st.lists(st.floats(0.0, 1.0), max_size=20), st.floats(0.05, 1.0))
def test_training_stops_exactly_at_a_low_first_step_or_at_several_low_steps_in_a_row(
    sizes: list[float], min_ess: float
) -> None:
    low = [size < min_ess for size in sizes]
    runs = [at for at in range(len(low)) if all(low[max(0, at - MAX_LOW + 1) : at + 1])]
    expected = next((at for at in runs if at == 0 or at >= MAX_LOW), None)
    limit, stopped = SampleSizeLimit(min_ess), None
    for at, size in enumerate(sizes):
        try:
            limit.observe(at + 1, {"logged_ess": size})
        except UserError:
            stopped = at
            break
    assert stopped == expected


def test_the_table_names_what_was_trained_and_what_was_not() -> None:
    report = RetrainReport(Staleness(0, "run"), num_selected=12, num_sent=9, num_left=1)
    report.staleness.add("run", [0, 3])
    report.add_step(1, {**metrics_of([1.0, 1.0]), "reward_mean": 0.25})
    report.add_step(2, {**metrics_of([1.0, 0.01]), "reward_mean": 0.75, "no_update": 1.0})
    report.skipped["held_out"] += 2
    report.broken += [BrokenGroup(f"g{at}", "ValueError: no JSON") for at in range(7)]
    console = Console(file=io.StringIO(), width=100)
    console.print(render(report, "new hooks"))
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    for part in (
        "8 (selected: 12)",
        "2 (1 without an update)",
        "0.500",
        "1 group at the end: too few for another step",
        "not trained, held_out: 2 groups",
        "group g0 cannot be read: ValueError: no JSON",
        "and 2 more groups that cannot be read",
    ):
        assert part in text
    assert report.as_json()["steps_without_update"] == 1
