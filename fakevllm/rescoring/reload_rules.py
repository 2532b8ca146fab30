"""The decision whether new hooks take over from the running hooks. This module does no I/O."""

from __future__ import annotations

from fakevllm.config.hook_reload import ReloadSection
from fakevllm.rescoring.comparison import HookComparison
from fakevllm.runtime.plurals import counted

MIN_WITH_SIGNAL = 10
"""Minimum number of groups with a signal for which the limit `max_lost_signal` is applied. A share
of fewer groups would not be reliable."""


class ReloadRules:
    """Decides by the limits in the section `[hooks.reload]` whether edited hooks take over.

    A failure of the edited hooks counts only for a group that the old hooks scored.

    >>> from fakevllm.rescoring.comparison import RescoredGroup
    >>> comparison = HookComparison()
    >>> comparison.add(RescoredGroup("g1", [0.0, 1.0], None, "hook_nan: reward 1 is nan"))
    >>> ReloadRules(ReloadSection()).refusal(comparison).partition(":")[0]
    'they failed for 1 of 1 scored group (limit hooks.reload.max_failed = 0), first for g1'
    """

    def __init__(self, limits: ReloadSection) -> None:
        self._limits = limits

    def is_hopeless(self, comparison: HookComparison, num_groups: int) -> bool:
        """Return True if the new hooks have already failed for so many groups (requests with their
        answers) that the hooks will be refused, whatever the other groups show. `comparison` has
        the results so far, and `num_groups` is the number of groups on which the new hooks are
        tried."""
        return comparison.num_new_failures > self._limits.max_failed * num_groups

    def refusal(self, comparison: HookComparison) -> str | None:
        """Return the reason why the new hooks must not take over from the running hooks. Return
        None if they may take over."""
        num_failed, first = comparison.num_new_failures, comparison.first_new_failure
        num = comparison.num_compared + num_failed
        if first is not None and num_failed > self._limits.max_failed * num:
            return (
                f"they failed for {num_failed} of {counted(num, 'scored group')} (limit "
                f"hooks.reload.max_failed = {self._limits.max_failed:g}), first for "
                f"{first.group_id}: {first.reason}"
            )
        had_signal, num_lost = comparison.old.num_with_signal, comparison.num_lost
        is_enough = had_signal >= MIN_WITH_SIGNAL
        if is_enough and num_lost > self._limits.max_lost_signal * had_signal:
            return (
                f"{num_lost} of {had_signal} groups lose their signal, because all their new "
                "rewards are equal (limit hooks.reload.max_lost_signal = "
                f"{self._limits.max_lost_signal:g})"
            )
        return None
