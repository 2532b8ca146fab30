"""The count of the latest groups that failed in a hook."""

from __future__ import annotations

from fakevllm.groups.hook_failures import NUM_LATEST, HookFailureCount, LatestHookFailures

HOOKS = "f30a"
RAISED = "hook_raised: KeyError: 'my secret (42)' (mine.py:2)"


def test_without_failures_there_is_no_count() -> None:
    latest = LatestHookFailures()
    assert latest.count() is None
    for reason in (None, "tied", "client_disconnected"):
        latest.add(reason, HOOKS)
    assert latest.count() is None


def test_the_latest_failure_is_quoted_without_the_message_of_its_exception() -> None:
    latest = LatestHookFailures()
    latest.add("hook_timeout: no result after 30 s", HOOKS)
    latest.add(RAISED, HOOKS)
    latest.add(None, HOOKS)
    assert latest.count() == HookFailureCount(2, 3, "hook_raised: KeyError (mine.py:2)")


def test_a_hook_process_that_was_closed_is_not_counted() -> None:
    latest = LatestHookFailures()
    latest.add("hook_closed: stopping", HOOKS)
    latest.add(RAISED, HOOKS)
    count = latest.count()
    assert count is not None and (count.num_failed, count.num_groups) == (1, 1)


def test_old_groups_are_no_longer_counted() -> None:
    latest = LatestHookFailures()
    latest.add(RAISED, HOOKS)
    for _ in range(NUM_LATEST - 1):
        latest.add(None, HOOKS)
    count = latest.count()
    assert count is not None and (count.num_failed, count.num_groups) == (1, NUM_LATEST)
    latest.add(None, HOOKS)
    assert latest.count() is None


def test_the_count_starts_again_when_other_hooks_are_loaded() -> None:
    latest = LatestHookFailures()
    latest.add(RAISED, HOOKS)
    latest.add(None, "b17c")
    assert latest.count() is None
