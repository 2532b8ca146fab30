"""Changes of the hooks and of the job from step to step."""

from __future__ import annotations

from fakevllm_adapters.protocol.reward_changes import GONE_AFTER_STEPS, RewardChanges


def changed_steps(*hooks: str) -> list[int]:
    """Return the numbers of the steps at which a change was found. There is one text per step, with
    one letter for each hook of the step."""
    changes = RewardChanges()
    return [step for step, names in enumerate(hooks, 1) if changes.observe(names, ["j"])]


def test_other_hooks_are_a_change_and_so_is_the_return_of_the_first_ones() -> None:
    assert changed_steps("a", "a", "b", "b", "a") == [3, 5]


def test_steps_without_a_known_hook_are_no_change() -> None:
    assert changed_steps("", "a", "", "a", "", "b") == [6]


def test_a_step_with_groups_of_both_hooks_begins_the_new_part() -> None:
    assert changed_steps("a", "ab", "b", "b") == [2]


def test_apps_with_different_hooks_on_one_server_are_one_change() -> None:
    assert changed_steps("a", "ab", "b", "a", "ab", "a", "b") == [2]


def test_hooks_that_were_gone_for_several_steps_are_new_when_they_return() -> None:
    assert changed_steps("ab", *"b" * GONE_AFTER_STEPS, "a") == [GONE_AFTER_STEPS + 2]


def test_hooks_and_job_may_change_together() -> None:
    changes = RewardChanges()
    assert changes.observe(["a"], [""]) == ""  # an older server
    assert changes.observe(["a"], ["j"]) == ""
    assert changes.observe(["b"], ["k"]) == "the hooks and the job changed"
