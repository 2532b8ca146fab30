"""A hook that fails is told once for each kind of failure, then with a count."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakevllm.groups.hook_warnings import REWARD, SUBMIT, TELL_AGAIN_S, HookWarnings

RAISED = "hook_raised: KeyError: 'a' (mine.py:2)"


def failing() -> HookWarnings:
    return HookWarnings(Path("mine"), Path("runs/ledger.sqlite"))


@pytest.mark.parametrize("reason", [RAISED, "hook_length: got 1, want 4", "hook_timeout: 30 s"])
def test_a_failure_is_told_with_what_became_of_it_and_the_next_step(reason: str) -> None:
    line = failing().line(REWARD, reason, 5.0)
    assert line is not None and f"({reason})" in line
    assert "the app got its answer, and the group is dropped" in line
    assert line.endswith("fakevllm check-hook mine --ledger runs/ledger.sqlite")


def test_the_same_kind_is_told_again_after_a_while_with_a_count() -> None:
    told = failing()
    assert told.line(REWARD, RAISED, 0.0)
    for at in (1.0, 2.0):
        assert told.line(REWARD, f"hook_raised: KeyError: '{at}' (mine.py:2)", at) is None
    assert "failed 3 times more (now: " in (told.line(REWARD, RAISED, TELL_AGAIN_S) or "")
    assert told.line(REWARD, RAISED, TELL_AGAIN_S + 1) is None


def test_each_hook_is_told_for_itself_with_what_became_of_the_request() -> None:
    told = failing()
    assert told.line(REWARD, RAISED, 0.0)
    line = told.line(SUBMIT, RAISED, 0.0) or ""
    assert line.startswith("on_user_submit_new_requests failed") and "served once" in line
    assert told.line(SUBMIT, RAISED, 1.0) is None


def test_another_kind_is_told_at_once() -> None:
    told = failing()
    others = (
        "hook_raised: ValueError: a (mine.py:2)",
        "hook_raised: KeyError: 'a' (mine.py:9)",
        "hook_nan: reward 1 is nan",
    )
    assert all(told.line(REWARD, reason, 0.0) for reason in (RAISED, *others))


@pytest.mark.parametrize("reason", [None, "fewer_than_two_rewards", "hook_closed: stopping"])
def test_what_no_hook_did_is_not_told(reason: str | None) -> None:
    assert failing().line(REWARD, reason, 0.0) is None
