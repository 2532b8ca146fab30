"""Run the reward hook over logged groups, in several processes, and keep the results in the ledger.

Groups that the same hooks have scored before are not scored again, so an interrupted command can be
repeated. The hooks are identified by the content hash of their files. Groups for which the hooks
failed are scored again, because the cause may have been temporary.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fakevllm.errors import LedgerError, UserError
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.results import HookReason, RewardOutcome, hook_reason
from fakevllm.hooks.sandbox import HookSandbox
from fakevllm.ledger.broken_rows import READ_ERRORS, BrokenGroup
from fakevllm.ledger.rescored_rows import RescoredRow, RescoredSibling
from fakevllm.ledger.store import Ledger
from fakevllm.rescoring.comparison import RescoredGroup
from fakevllm.rescoring.logged_groups import LoggedGroup
from fakevllm.runtime.bounded_tasks import run_bounded
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.protocol.swarm import Task

HOOKS_CHANGED = (
    "The hook files were changed while the command ran, and a hook process was started with the "
    "new files: run the command again."
)
RUN_AGAIN = "run the command again, which scores only what is missing"
MAX_PROCESSES = 4
"""Maximum number of processes that run the hooks."""
MAX_WAITING = 100
"""Maximum number of unwritten results. If there are more, the command waits until the ledger has
written them."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """The hooks with which a Rescorer scores groups, and the settings for running these hooks."""

    path: Path
    timeout_s: float
    sandbox: HookSandbox
    concurrency: int
    """Number of groups that are scored at a time. Async hooks are faster if this number is larger
    than `num_processes`."""
    failure_floor: float | None = None
    """Reward of unusable answers: the setting `reward.failure_floor`. The ledger stores the rewards
    as the hooks returned them, without this floor."""
    tasks: Mapping[str, Task] = field(default_factory=dict[str, Task])
    """Rows of the dataset file, by the ids of their tasks. The ledger does not have these rows."""
    redaction: RedactionInUse | None = None
    """What is redacted in the output of the hooks; None means nothing."""

    @property
    def num_processes(self) -> int:
        """Number of processes that run the hooks. A process runs one sync hook at a time."""
        return min(self.concurrency, MAX_PROCESSES, os.cpu_count() or 1)


class Rescorer:
    """The scorer of logged groups, with one version of the hooks. Use it as a context manager,
    which starts the hook processes and ends them."""

    def __init__(self, ledger: Ledger, scorer: Scorer, *, again: bool = False) -> None:
        """Create the rescorer. With `again`, groups that the same hooks have already scored are
        scored once more."""
        self._ledger = ledger
        self._scorer = scorer
        self._again = again
        self._stack = AsyncExitStack()
        self._workers: list[HookWorker] = []
        self.hook_hash = ""
        """Content hash of the hook files."""
        self._num_running: Counter[int] = Counter()
        """For each worker, by its position: the number of groups that it is scoring."""

    async def __aenter__(self) -> Rescorer:
        """Start the hook processes. Raises HookError if the hooks cannot be loaded."""
        try:
            for _ in range(self._scorer.num_processes):
                worker = self._new_worker()
                self._stack.push_async_callback(worker.close)
                info = await worker.start()
                self._check_hash(info.content_hash)
                self._workers.append(worker)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    def _new_worker(self) -> HookWorker:
        scorer = self._scorer
        return HookWorker(scorer.path, scorer.timeout_s, scorer.sandbox, redaction=scorer.redaction)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def score(self, group_ids: Iterable[str]) -> AsyncGenerator[RescoredGroup | BrokenGroup]:
        """Score the groups, and yield the results in the order in which they are ready.

        Raises UserError if the hook files change, and LedgerError if results cannot be written.
        """
        attempts = (self._score_one(group_id) for group_id in group_ids)
        async with aclosing(run_bounded(attempts, self._scorer.concurrency)) as ended:
            async for result in ended:
                yield result

    async def _score_one(self, group_id: str) -> RescoredGroup | BrokenGroup:
        try:
            group, known = await asyncio.to_thread(self._read, group_id)
        except READ_ERRORS as error:
            return BrokenGroup.of(group_id, error)
        if known is not None:
            return group.rescored(known, None, self._scorer.failure_floor, is_known=True)
        outcome = await self._run_hook(group)
        if hook_reason(outcome.reason) is HookReason.LOAD:
            raise UserError(f"The hooks cannot be loaded any more: {outcome.reason}.")
        self._check_hash(outcome.hook_hash or self.hook_hash)
        await self._write(group, outcome)
        return group.rescored(outcome.rewards, outcome.reason, self._scorer.failure_floor)

    async def _run_hook(self, group: LoggedGroup) -> RewardOutcome:
        """Call the reward hook in the process with the fewest running calls."""
        position = min(range(len(self._workers)), key=lambda one: self._num_running[one])
        recorded = group.recorded
        self._num_running[position] += 1
        try:
            return await self._workers[position].reward(
                recorded.siblings(), recorded.answers, recorded.question
            )
        finally:
            self._num_running[position] -= 1

    def _read(self, group_id: str) -> tuple[LoggedGroup, list[float | None] | None]:
        """Read a group. Return a pair: the group, and the rewards that an earlier command with the
        same hooks has stored. The rewards are None if the group must be scored."""
        find_task = partial(self._ledger.task, rows=self._scorer.tasks)
        group = LoggedGroup.read(self._ledger, group_id, find_task)
        known, reason = self._ledger.rescored.find(group_id, self.hook_hash)
        indices = group.recorded.indices
        if self._again or reason is not None or set(known) != set(indices):
            return group, None
        return group, [known[index] for index in indices]

    async def _write(self, group: LoggedGroup, outcome: RewardOutcome) -> None:
        """Store the rewards that the hooks have returned for a group. Raises LedgerError if results
        cannot be written."""
        indices = group.recorded.indices
        rewards = outcome.rewards or [None] * len(indices)
        annotations = outcome.annotations or [{} for _ in indices]
        columns = zip(indices, rewards, annotations, strict=True)
        siblings = [RescoredSibling(*column) for column in columns]
        group_id, now = group.recorded.request_id, time.time()
        row = RescoredRow(group_id, self.hook_hash, siblings, outcome.reason, now)
        self._ledger.rescored.put(row)
        if self._ledger.health.waiting > MAX_WAITING:
            await self.flush()
        self._check_written()

    async def flush(self) -> None:
        """Wait until all results are in the ledger's file. Raises LedgerError if a result cannot be
        written."""
        is_written = await self._ledger.flush()
        self._check_written()
        if not is_written:
            raise LedgerError(f"the ledger's disk is too slow; {RUN_AGAIN}")

    def _check_written(self) -> None:
        health = self._ledger.health
        if health.dropped:
            raise LedgerError(f"the new rewards cannot be written ({health.error}); {RUN_AGAIN}")

    def _check_hash(self, content_hash: str) -> None:
        self.hook_hash = self.hook_hash or content_hash
        if content_hash != self.hook_hash:
            raise UserError(HOOKS_CHANGED)
