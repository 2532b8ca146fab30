"""Each kind of hook failure is logged once, then at intervals with a count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fakevllm.groups.hook_warnings import (
    INTERVAL_S,
    OTHER_ARM_REWARD,
    REWARD,
    SUBMIT,
    HookKind,
    HookWarnings,
    reward_failure,
)
from tests.proxy.ledger.ledger_cases import group

RAISED = "hook_raised: KeyError: 'a' (mine.py:2)"


def new_warnings() -> HookWarnings:
    return HookWarnings(Path("mine"), Path("runs/ledger.sqlite"))


@pytest.mark.parametrize("reason", [RAISED, "hook_length: got 1, want 4", "hook_timeout: 30 s"])
def test_a_warning_names_the_failure_its_effect_and_the_next_step(reason: str) -> None:
    line = new_warnings().line(REWARD, reason, 5.0)
    assert line is not None and f"({reason})" in line
    assert "the app got its answer, and the group is dropped" in line
    assert line.endswith("fakevllm check-hook mine --ledger runs/ledger.sqlite")


def test_failures_of_one_kind_are_logged_again_after_the_interval_with_a_count() -> None:
    warnings = new_warnings()
    assert warnings.line(REWARD, RAISED, 0.0)
    for at in (1.0, 2.0):
        assert warnings.line(REWARD, f"hook_raised: KeyError: '{at}' (mine.py:2)", at) is None
    assert "failed 3 times more (now: " in (warnings.line(REWARD, RAISED, INTERVAL_S) or "")
    assert warnings.line(REWARD, RAISED, INTERVAL_S + 1) is None


def test_each_hook_has_its_own_warning_and_effect() -> None:
    warnings = new_warnings()
    assert warnings.line(REWARD, RAISED, 0.0)
    line = warnings.line(SUBMIT, RAISED, 0.0) or ""
    assert line.startswith("on_user_submit_new_requests failed") and "served once" in line
    assert warnings.line(SUBMIT, RAISED, 1.0) is None


def test_a_failure_of_another_kind_is_logged_at_once() -> None:
    warnings = new_warnings()
    other_reasons = (
        "hook_raised: ValueError: a (mine.py:2)",
        "hook_raised: KeyError: 'a' (mine.py:9)",
        "hook_nan: reward 1 is nan",
    )
    assert all(warnings.line(REWARD, reason, 0.0) for reason in (RAISED, *other_reasons))


@pytest.mark.parametrize("reason", [None, "fewer_than_two_rewards", "hook_closed: stopping"])
def test_reasons_that_are_no_hook_failure_are_not_logged(reason: str | None) -> None:
    assert new_warnings().line(REWARD, reason, 0.0) is None


@pytest.mark.parametrize(
    ("state", "reason", "failure"),
    [
        ("dropped", RAISED, (REWARD, RAISED)),
        ("served", f"other_arm: {RAISED}", (OTHER_ARM_REWARD, RAISED)),
        ("served", "other_arm", (REWARD, None)),
        ("pooled", None, (REWARD, None)),
    ],
)
def test_a_hook_that_fails_for_an_arm_that_does_not_train_is_a_failure_too(
    state: str, reason: str | None, failure: tuple[HookKind, str | None]
) -> None:
    ended = replace(group("g"), state=state, reason=reason)
    assert reward_failure(ended) == failure
