"""Run new hooks on the latest logged groups (requests with answers), in a separate process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from fakevllm.config.hook_reload import ReloadSection
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.results import HookFailure
from fakevllm.ledger.broken_rows import READ_ERRORS
from fakevllm.ledger.selection import GroupSelection
from fakevllm.rescoring.comparison import HookComparison, RescoredGroup
from fakevllm.rescoring.logged_groups import MIN_ANSWERS, GroupSource, LoggedGroup
from fakevllm.rescoring.reload_rules import ReloadRules
from fakevllm.runtime.bounded_tasks import run_bounded
from fakevllm_adapters.protocol.swarm import Task

CONCURRENCY = 2
"""Number of groups that are tried at a time. The number is small, because the proxy serves apps at
the same time."""


@dataclass(slots=True)
class Trial:
    """The results so far of a trial, which runs new hooks on logged groups. The results can be read
    while the trial runs."""

    num_groups: int = 0
    """Number of groups that the trial has found in the ledger."""
    num_skipped: int = 0
    """Number of groups that the trial skipped, because a group cannot be read or because its
    dataset row is unknown."""
    comparison: HookComparison = field(default_factory=HookComparison)
    results: list[RescoredGroup] = field(default_factory=list[RescoredGroup])
    """The old and the new rewards of each group that was tried, in the order in which the hooks
    ended."""


class HookTrial:
    """Runs new hooks on the latest groups of one ledger (the proxy's database), and compares the
    new rewards with the recorded rewards."""

    def __init__(
        self,
        ledger: GroupSource,
        file: Path,
        find_task: Callable[[str], Task | None],
        limits: ReloadSection,
        failure_floor: float | None = None,
    ) -> None:
        """Create the trial. `file` is the path of `ledger`, the proxy's database. `find_task` takes
        a task id, and returns the dataset task or None. `failure_floor` is the setting
        `reward.failure_floor`."""
        self._ledger = ledger
        self._file = file
        self._find_task = find_task
        self._limits = limits
        self._rules = ReloadRules(limits)
        self._failure_floor = failure_floor

    async def run(self, worker: HookWorker, trial: Trial) -> str | None:
        """Run the hooks of `worker`, which is already started, on the latest groups (requests with
        their answers). Add the results to `trial`. Return None if these hooks may replace the
        proxy's present hooks. Otherwise return the reason why not. The trial ends early if the
        reason is certain before all groups are tried.

        Raises UserError if the ledger (the proxy's database) cannot be read.
        """
        if self._limits.groups == 0:
            return None
        group_ids = await asyncio.to_thread(self._latest)
        trial.num_groups = len(group_ids)
        attempts = (self._try(worker, group_id) for group_id in group_ids)
        async with aclosing(run_bounded(attempts, CONCURRENCY)) as results:
            async for result in results:
                if result is None:
                    trial.num_skipped += 1
                else:
                    trial.comparison.add(result)
                    trial.results.append(result)
                if self._rules.is_hopeless(trial.comparison, trial.num_groups):
                    break
        if group_ids and trial.num_skipped == len(group_ids):
            return (
                f"none of the latest {len(group_ids)} groups could be tried, because they cannot "
                "be read, because their texts are redacted, or because their dataset row is "
                "unknown; try again after new requests, or restart the proxy, which loads the "
                "files without a trial"
            )
        return self._rules.refusal(trial.comparison)

    def _latest(self) -> list[str]:
        selection = GroupSelection(self._file, None, self._limits.groups, MIN_ANSWERS)
        return list(selection.find().ids())

    async def _try(self, worker: HookWorker, group_id: str) -> RescoredGroup | None:
        """Run the hooks on one group, in the same way as for a live request. Return None if the
        group is skipped."""
        try:
            group = await asyncio.to_thread(
                LoggedGroup.read, self._ledger, group_id, self._find_task
            )
        except READ_ERRORS:
            return None
        if group.lacks_task or group.is_redacted:
            return None
        recorded = group.recorded
        plan = await worker.submit(recorded.request_id, recorded.task)
        if isinstance(plan, HookFailure):
            return group.rescored(None, plan.reason, self._failure_floor)
        outcome = await worker.reward(recorded.siblings(), recorded.answers, recorded.question)
        return group.rescored(outcome.rewards, outcome.reason, self._failure_floor)
