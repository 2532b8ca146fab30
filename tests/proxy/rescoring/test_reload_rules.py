"""The limits within which new hooks take over."""

from __future__ import annotations

import pytest

from fakevllm.config.hook_reload import ReloadSection
from fakevllm.rescoring.comparison import HookComparison, RescoredGroup
from fakevllm.rescoring.reload_rules import MIN_WITH_SIGNAL, ReloadRules


def compared(
    *, good: int = 0, failed: int = 0, lost: int = 0, without_signal: int = 0
) -> HookComparison:
    comparison = HookComparison()
    for _ in range(good):
        comparison.add(RescoredGroup("g", [0, 1], [0, 1]))
    for number in range(failed):
        comparison.add(RescoredGroup("g", [0, 1], None, f"hook_raised: number {number}"))
    for _ in range(lost):
        comparison.add(RescoredGroup("g", [0, 1], [1, 1]))
    for _ in range(without_signal):
        comparison.add(RescoredGroup("g", [1, 1], [1, 1]))
    return comparison


def test_a_failure_is_refused_by_default_with_its_reason() -> None:
    refusal = ReloadRules(ReloadSection()).refusal(compared(good=49, failed=1))
    assert refusal is not None and refusal.startswith("they failed for 1 of 50 scored groups")
    assert refusal.endswith("first for g: hook_raised: number 0")


@pytest.mark.parametrize(("failed", "is_refused"), [(5, False), (6, True)])
def test_the_share_of_failures_has_a_limit(failed: int, is_refused: bool) -> None:
    rules = ReloadRules(ReloadSection(max_failed=0.1))
    assert (rules.refusal(compared(good=50 - failed, failed=failed)) is not None) == is_refused


def test_a_trial_is_hopeless_as_soon_as_the_rest_cannot_save_it() -> None:
    rules = ReloadRules(ReloadSection(max_failed=0.1))
    assert not rules.is_hopeless(compared(failed=5), 50)
    assert rules.is_hopeless(compared(failed=6), 50)
    assert ReloadRules(ReloadSection()).is_hopeless(compared(failed=1), 50)


@pytest.mark.parametrize(
    ("num_lost", "num_kept", "limit", "is_refused"),
    [
        (MIN_WITH_SIGNAL, 0, 0.9, True),
        (MIN_WITH_SIGNAL, 0, 1.0, False),
        (MIN_WITH_SIGNAL - 1, 0, 0.9, False),
        (9, 1, 0.9, False),
        (5, 6, 0.4, True),
    ],
)
def test_the_share_of_groups_that_lose_their_signal_has_a_limit(
    num_lost: int, num_kept: int, limit: float, is_refused: bool
) -> None:
    rules = ReloadRules(ReloadSection(max_lost_signal=limit))
    comparison = compared(good=num_kept, lost=num_lost, without_signal=30)
    refusal = rules.refusal(comparison)
    assert (refusal is not None) == is_refused
    assert refusal is None or "hooks.reload.max_lost_signal" in refusal


def test_hooks_that_were_tried_on_no_group_take_over() -> None:
    assert ReloadRules(ReloadSection()).refusal(compared()) is None
    assert ReloadRules(ReloadSection(max_lost_signal=0)).refusal(compared(good=20)) is None


def test_a_failure_on_a_group_that_the_old_hooks_did_not_score_does_not_count() -> None:
    rules, comparison = ReloadRules(ReloadSection()), compared(good=1)
    comparison.add(RescoredGroup("g", [None, None], None, "hook_timeout: 5 s"))
    assert not rules.is_hopeless(comparison, 2) and rules.refusal(comparison) is None
    comparison.add(RescoredGroup("new", [0, 1], None, "hook_raised: X"))
    refusal = rules.refusal(comparison)
    assert refusal is not None and refusal.startswith("they failed for 1 of 2 scored groups")
    assert refusal.endswith("first for new: hook_raised: X")
