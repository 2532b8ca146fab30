"""Run the reward hook over logged groups, in several processes, and keep the results in the ledger.

Groups that the same hooks have scored before are not scored again, so an interrupted command can be
repeated. The hooks are identified by the content hash of their files.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from fakevllm.errors import UserError
from fakevllm.groups.sibling_selection import with_floor
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.results import HookReason, RewardOutcome, hook_reason
from fakevllm.hooks.sandbox import HookSandbox
from fakevllm.ledger.broken_rows import READ_ERRORS, BrokenGroup
from fakevllm.ledger.rescored_rows import RescoredRow, RescoredSibling
from fakevllm.ledger.store import Ledger
from fakevllm.rescoring.comparison import RescoredGroup
from fakevllm.rescoring.logged_groups import LoggedGroup
from fakevllm.runtime.bounded_tasks import run_bounded

HOOKS_CHANGED = (
    "The hook files changed while the groups were scored, so some rewards are of the old files: "
    "run the command again."
)


@dataclass(frozen=True, slots=True)
class Scorer:
    """The hooks that score the groups, and how they run."""

    path: Path
    timeout_s: float
    sandbox: HookSandbox
    num_processes: int
    """Number of processes that run the hooks. A process runs one sync hook at a time."""
    concurrency: int
    """Number of groups that are scored at a time. More than one for each process helps async
    hooks."""
    failure_floor: float | None = None
    """Reward of unusable answers: the setting `reward.failure_floor`."""


class Rescorer:
    """Scores groups of one ledger with one version of the hooks. Use it as a context manager, which
    starts the hook processes and ends them."""

    def __init__(self, ledger: Ledger, scorer: Scorer, *, again: bool = False) -> None:
        """Create the rescorer. With `again`, groups are scored again that the same hooks have
        scored before."""
        self._ledger = ledger
        self._scorer = scorer
        self._again = again
        self._stack = AsyncExitStack()
        self._workers: list[HookWorker] = []
        self.hook_hash = ""
        """Content hash of the hook files."""
        self.num_scored = 0
        """Groups that were scored now, and not by an earlier command."""

    async def __aenter__(self) -> Rescorer:
        """Start the hook processes. Raises HookError if the hooks cannot be loaded."""
        try:
            for _ in range(self._scorer.num_processes):
                worker = HookWorker(self._scorer.path, self._scorer.timeout_s, self._scorer.sandbox)
                self._stack.push_async_callback(worker.close)
                info = await worker.start()
                self._check_hash(info.content_hash)
                self._workers.append(worker)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def score(self, group_ids: Sequence[str]) -> AsyncGenerator[RescoredGroup | BrokenGroup]:
        """Score the groups, and yield the results in the order in which they are ready.

        Raises UserError if the hook files change, and LedgerError if results cannot be written.
        """
        workers = itertools.cycle(self._workers)
        attempts = (self._score_one(group_id, next(workers)) for group_id in group_ids)
        async with aclosing(run_bounded(attempts, self._scorer.concurrency)) as ended:
            async for result in ended:
                yield result

    async def _score_one(self, group_id: str, worker: HookWorker) -> RescoredGroup | BrokenGroup:
        try:
            group, known = await asyncio.to_thread(self._read, group_id)
        except READ_ERRORS as error:
            return BrokenGroup.of(group_id, error)
        if known is not None:
            return known
        recorded = group.recorded
        outcome = await worker.reward(recorded.siblings(), recorded.answers, recorded.question)
        outcome = self._with_floor(outcome, group)
        if hook_reason(outcome.reason) is HookReason.LOAD:
            raise UserError(f"The hooks cannot be loaded any more: {outcome.reason}.")
        self._check_hash(outcome.hook_hash or self.hook_hash)
        self.num_scored += 1
        self._write(group, outcome)
        return _result(group, outcome.rewards, outcome.reason)

    def _read(self, group_id: str) -> tuple[LoggedGroup, RescoredGroup | None]:
        """Read a group, and the result of an earlier command with the same hooks, if there is
        one."""
        record = self._ledger.group(group_id)
        if record is None:
            raise KeyError("the group is not in the ledger any more")
        group = LoggedGroup.of(record, self._ledger.recorded(record))
        known, reason = self._ledger.rescored.find(group_id, self.hook_hash)
        indices = group.recorded.indices
        if self._again or set(known) != set(indices):
            return group, None
        rewards = None if reason is not None else [known[index] for index in indices]
        return group, _result(group, rewards, reason)

    def _with_floor(self, outcome: RewardOutcome, group: LoggedGroup) -> RewardOutcome:
        if outcome.rewards is None:
            return outcome
        floor = self._scorer.failure_floor
        return replace(outcome, rewards=with_floor(outcome.rewards, group.failures, floor))

    def _write(self, group: LoggedGroup, outcome: RewardOutcome) -> None:
        indices = group.recorded.indices
        rewards = outcome.rewards or [None] * len(indices)
        siblings = [
            RescoredSibling(index, reward, annotations)
            for index, reward, annotations in zip(
                indices, rewards, outcome.annotations or [{} for _ in indices], strict=True
            )
        ]
        group_id, now = group.recorded.request_id, time.time()
        row = RescoredRow(group_id, self.hook_hash, siblings, outcome.reason, now)
        self._ledger.rescored.put(row)

    def _check_hash(self, content_hash: str) -> None:
        self.hook_hash = self.hook_hash or content_hash
        if content_hash != self.hook_hash:
            raise UserError(HOOKS_CHANGED)


def _result(
    group: LoggedGroup, rewards: Sequence[float | None] | None, reason: str | None
) -> RescoredGroup:
    group_id = group.recorded.request_id
    return RescoredGroup(group_id, group.rewards, rewards, reason, group.served)
