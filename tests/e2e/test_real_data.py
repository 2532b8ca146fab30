"""A test of training with 100 GSM8K questions through replay, proxy, hooks and embedded engine.

The rewarded format spreads, but not in the control whose weights are frozen.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gsm8k_format import DATA, EPOCHS, NUM_FITTING, TOO_LONG, Gsm8kRun, run

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not DATA.exists(), reason=f"the dataset {DATA} is missing"),
]

MIN_STEPS = 30
CONTEXT = "This model's maximum context length is 512 tokens."


def test_a_format_spreads_over_real_questions_when_rewarded(tmp_path: Path) -> None:
    learned = run(tmp_path, seed=0, control="none")
    report(learned)
    check_bookkeeping(learned)
    first = learned.policy_mean[0]
    assert 0.1 <= first <= 0.7, "at the start the format must occur, but not dominate"
    assert learned.end - first >= 0.2
    assert learned.end - learned.start >= 0.2


def test_the_frozen_control_stays_flat(tmp_path: Path) -> None:
    frozen = run(tmp_path, seed=0, control="frozen")
    report(frozen)
    check_bookkeeping(frozen)
    assert abs(frozen.end - frozen.start) <= 0.1


def check_bookkeeping(done: Gsm8kRun) -> None:
    """Check that each row has a group, and that rows that do not fit are counted as failed."""
    assert len(done.policy_mean) >= MIN_STEPS
    assert sum(done.groups.values()) == EPOCHS * (NUM_FITTING + len(TOO_LONG))
    failed = {reason: count for (state, reason), count in done.groups.items() if state == "failed"}
    assert failed == {"upstream_400": EPOCHS * len(TOO_LONG)}
    assert f"{EPOCHS * len(TOO_LONG)} failed" in done.replay_output
    assert done.replay_output.count(CONTEXT) == len(TOO_LONG)


def report(done: Gsm8kRun) -> None:
    curve = " ".join(f"{mean:.2f}" for mean in done.policy_mean)
    print(f"{done.control}: start rate {done.policy_mean[0]:.2f}, {done.wall_s:.0f} s\n{curve}")
