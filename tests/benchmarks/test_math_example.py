"""The benchmark of the math example reads what `fakevllm train` prints."""

from __future__ import annotations

from benchmarks.math_example import EVALUATION
from benchmarks.results import ROOT
from fakevllm.train.command import summarize
from fakevllm.train.config import load
from fakevllm.train.rollout_loop import Outcome


def test_the_evaluations_are_found_in_the_summary_of_a_run() -> None:
    outcome = Outcome(steps_before=0, rewards=[0.5], eval_before=0.7, eval_after=0.95)
    settings = load(ROOT / "examples/math/math.yaml")
    match = EVALUATION.search("\n".join(summarize(outcome, settings, 20, 64)))
    assert match is not None
    assert match.groups() == ("0.70", "0.95")
