"""The werewolves benchmark: reading the script's output, and the verdict over the seeds."""

from __future__ import annotations

from benchmarks import werewolves
from benchmarks.werewolves import WerewolvesRun, has_risen, read_run, summary_rows, verdict

OUTPUT = """\
before: won 0.500, aim 0.250
step 1: aim 0.300
step 2: aim 0.400
after:  won {won}, aim {aim}
"""


def make_run(seed: int, control: str, won: str, aim: str) -> WerewolvesRun:
    return read_run(OUTPUT.format(won=won, aim=aim), seed, control, 9.6)


def test_a_run_is_read_from_the_output_of_the_training_script() -> None:
    done = make_run(0, "none", "0.600", "0.450")
    assert done.policy_mean == [0.3, 0.4]
    assert done.before == werewolves.Evaluation(0.5, 0.25)
    assert done.own_cells() == {
        "steps": "2",
        "won before": "0.500",
        "won after": "0.600",
        "aim before": "0.250",
        "aim after": "0.450",
    }


def test_the_summary_has_mean_and_spread_of_the_changes_over_the_seeds() -> None:
    runs = [
        make_run(0, "none", "0.600", "0.450"),
        make_run(0, "frozen", "0.500", "0.250"),
        make_run(1, "none", "0.640", "0.450"),
        make_run(1, "frozen", "0.480", "0.250"),
    ]
    assert summary_rows(runs) == [
        ["yes", "+0.000 ± 0.000", "+0.120 ± 0.028", "+0.200 ± 0.000"],
        ["no (frozen)", "+0.000 ± 0.000", "-0.010 ± 0.014", "+0.000 ± 0.000"],
    ]


def test_a_rise_means_that_every_training_run_changed_more_than_every_control() -> None:
    assert has_risen([0.2, 0.1], [0.05, -0.1])
    assert not has_risen([0.2, 0.04], [0.05, -0.1])
    assert not has_risen([-0.1], [-0.2])


def test_the_verdict_says_which_figure_did_not_rise() -> None:
    runs = [make_run(0, "none", "0.490", "0.450"), make_run(0, "frozen", "0.500", "0.260")]
    text = verdict(runs)
    assert "The aim rose: the training runs changed by +0.200" in text
    assert "The share of games won did not rise" in text
