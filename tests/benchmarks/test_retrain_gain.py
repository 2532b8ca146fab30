"""The figures of the benchmark about `fakevllm retrain`, from numbers instead of runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.retrain_gain import HEADER, SeedFigures

FIGURES = SeedFigures(
    logged=0.3,
    start=0.2,
    retrained=0.6,
    live=0.7,
    groups=240,
    live_groups=240,
    ess=0.8,
    new_requests=0,
)


def test_the_gain_of_retrain_is_compared_with_the_gain_of_the_live_run() -> None:
    assert FIGURES.share_of_gain == pytest.approx(0.8)
    assert replace(FIGURES, retrained=0.61).failures == []
    assert replace(FIGURES, retrained=0.59).failures == ["the share of the gain is 0.78, below 0.8"]
    assert len(FIGURES.cells(0)) == len(HEADER)


def test_too_few_logged_answers_and_new_requests_are_failures() -> None:
    (few, new) = replace(FIGURES, retrained=0.7, logged=0.04, new_requests=2).failures
    assert few.startswith("the share of logged answers") and new == "2 new requests"


def test_a_live_run_that_gains_nothing_is_a_failure() -> None:
    assert replace(FIGURES, live=0.2).failures == ["the live run has no gain"]
