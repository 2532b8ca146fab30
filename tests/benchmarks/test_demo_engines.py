"""Tests of the comparison of the engine pairs in the demo."""

from __future__ import annotations

from benchmarks.demo_engines import compare, create_curves, create_table
from benchmarks.demo_learning import DemoRun


def run(after: float, seed: int = 0) -> DemoRun:
    return DemoRun(seed, "none", [0.5] * 15 + [0.9] * 10, 60.0, 0.52, after, {"trained": 200})


def test_pairs_whose_seeds_differ_but_whose_means_agree_are_accepted() -> None:
    verdict, is_close = compare(
        {"embedded": [run(0.90), run(1.0, seed=1)], "verl": [run(1.0), run(0.90, seed=1)]}
    )
    assert is_close
    assert "The largest difference is 0.000" in verdict


def test_a_pair_that_learns_less_than_the_others_is_not_accepted() -> None:
    verdict, is_close = compare({"embedded": [run(0.96)], "vllm": [run(0.95)], "verl": [run(0.9)]})
    assert not is_close
    assert "verl trains with 2 workers: 0.900" in verdict
    assert "The largest difference is 0.060" in verdict


def test_the_tables_have_a_row_for_each_run_and_a_column_for_each_pair() -> None:
    runs = {"embedded": [run(0.96), run(0.94, seed=1)], "vllm": [run(0.95)]}
    header, rows = create_table(runs)
    assert [dict(zip(header, row, strict=True))["after"] for row in rows] == [
        "0.960",
        "0.940",
        "0.950",
    ]
    assert create_curves(runs) == (
        ["steps", "embedded samples and trains", "vLLM samples, embedded trains"],
        [["1 to 15", "0.500", "0.500"], ["16 to 25", "0.900", "0.900"]],
    )
