"""The log line of a training step."""

from __future__ import annotations

from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE
from fakevllm_server.training.step_log import step_line

MEASURED = {
    "reward_mean": 0.4375,
    "groups": 8.0,
    "tokens_trained": 312.0,
    "rho": 4.333,
    "tokens_saved": 2100.0,
    "forest_speedup": 3.1,
    "token_fidelity": 1.0,
    "mismatch_k3": 0.00012,
    "ess": 0.9991,
    "equal_version": 0.25,
    "seconds": 0.52,
}


def test_the_line_shows_reward_saving_fidelity_and_time() -> None:
    assert step_line(3, 4, MEASURED) == (
        "step 3 → version 4: reward 0.438 of 8 groups, 312 tokens trained, "
        "rho 4.33 (2100 tokens saved, 3.10 times as quick as rows), "
        "fidelity 1, mismatch k3 0.00012, ess 0.999, 0.5 s"
    )


def test_the_line_shows_untrainable_tokens_and_missing_updates() -> None:
    line = step_line(3, 4, MEASURED | {"untrainable_tokens": 12, **NO_UPDATE})
    assert "12 untrainable" in line and "NO UPDATE" in line
    assert "NOT ALL UPDATES" in step_line(3, 4, MEASURED | {"skipped": 1.0})


def test_the_line_shows_the_number_of_updates_if_there_are_several() -> None:
    assert "312 tokens trained, 6 updates, rho" in step_line(3, 4, MEASURED | {"updates_made": 6.0})
    assert "updates" not in step_line(3, 4, MEASURED | {"updates_made": 1.0})


def test_the_line_shows_feedback_separately_from_groups() -> None:
    metrics = MEASURED | {"feedback_samples": 3.0, "feedback_tokens": 24.0}
    assert "312 tokens trained, feedback on 3 answers, 24 tokens trained, rho" in step_line(
        3, 4, metrics
    )


def test_the_line_lists_metrics_that_are_not_finite() -> None:
    invalid = {"loss": float("nan"), "grad_norm": float("inf"), "mismatch_k3": float("nan")}
    line = step_line(3, 4, MEASURED | invalid | NO_UPDATE)
    assert "mismatch k3 nan, ess 0.999, NO UPDATE" in line
    assert "loss nan, grad_norm inf" in line


def test_the_line_shows_a_dash_for_an_unmeasured_mismatch() -> None:
    unmeasured = {"mismatch_k3", "ess", "equal_version"}
    metrics = {name: value for name, value in MEASURED.items() if name not in unmeasured}
    assert "fidelity 1, mismatch k3 -, ess -, 0.5 s" in step_line(3, 4, metrics)


def test_the_line_marks_a_mismatch_that_includes_the_age_of_weights() -> None:
    assert "mismatch k3 0.00012 with age" in step_line(3, 4, MEASURED | {"equal_version": 0.0})


def test_the_line_omits_unmeasured_metrics() -> None:
    line = step_line(1, 1, {"reward_mean": 0.5, "groups": 1, "tokens_trained": 4, "rho": 1.0})
    assert line == (
        "step 1 → version 1: reward 0.500 of 1 groups, 4 tokens trained, rho 1.00 (0 tokens saved)"
    )
