"""The line a step prints."""

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


def test_a_line_has_the_reward_the_saving_the_truth_and_the_time() -> None:
    assert step_line(3, 4, MEASURED) == (
        "step 3 → version 4: reward 0.438 of 8 groups, 312 tokens trained, "
        "rho 4.33 (2100 tokens saved, 3.10 times as quick as rows), "
        "fidelity 1, mismatch k3 0.00012, ess 0.999, 0.5 s"
    )


def test_a_line_says_what_was_left_out_and_that_there_was_no_update() -> None:
    line = step_line(3, 4, MEASURED | {"untrainable_tokens": 12, **NO_UPDATE})
    assert "12 untrainable" in line and "NO UPDATE" in line
    assert "NOT ALL UPDATES" in step_line(3, 4, MEASURED | {"skipped": 1.0})


def test_a_line_tells_feedback_apart_from_groups() -> None:
    beside = MEASURED | {"feedback_samples": 3.0, "feedback_tokens": 24.0}
    assert "312 tokens trained, feedback on 3 answers, 24 tokens trained, rho" in step_line(
        3, 4, beside
    )


def test_a_line_says_which_numbers_were_none() -> None:
    odd = {"loss": float("nan"), "grad_norm": float("inf"), "mismatch_k3": float("nan")}
    line = step_line(3, 4, MEASURED | odd | NO_UPDATE)
    assert "mismatch k3 nan, ess 0.999, NO UPDATE" in line
    assert "loss nan, grad_norm inf" in line


def test_a_line_has_a_dash_where_the_mismatch_was_not_measured() -> None:
    unmeasured = {"mismatch_k3", "ess", "equal_version"}
    some = {name: value for name, value in MEASURED.items() if name not in unmeasured}
    assert "fidelity 1, mismatch k3 -, ess -, 0.5 s" in step_line(3, 4, some)


def test_a_line_says_where_the_mismatch_has_the_drift_of_older_weights_in_it() -> None:
    assert "mismatch k3 0.00012 with age" in step_line(3, 4, MEASURED | {"equal_version": 0.0})


def test_a_line_says_nothing_of_what_was_not_measured() -> None:
    line = step_line(1, 1, {"reward_mean": 0.5, "groups": 1, "tokens_trained": 4, "rho": 1.0})
    assert line == (
        "step 1 → version 1: reward 0.500 of 1 groups, 4 tokens trained, rho 1.00 (0 tokens saved)"
    )
