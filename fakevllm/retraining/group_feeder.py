"""Send logged groups to a server, step by step.

The groups are sent in the order of the ledger (the proxy's database). When enough groups for a step
have been sent, the next group is sent only after this step has ended. If the same groups are
trained in two runs, each step therefore has the same groups in both runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from fakevllm.ledger.broken_rows import READ_ERRORS, BrokenGroup
from fakevllm.retraining import server_calls
from fakevllm.retraining.group_reader import NotTrained, TrainableGroup
from fakevllm.retraining.report import RetrainReport
from fakevllm.retraining.sample_size_limit import SampleSizeLimit
from fakevllm.sdk.http_driver import AsyncHttpDriver
from fakevllm.sdk.types import ServerUnreachable, SwarmError
from fakevllm_adapters.protocol.swarm import AddLoggedGroupRequest, LogEntry


@dataclass(slots=True)
class GroupFeeder:
    """Sends the logged groups of one `fakevllm retrain` to the server that trains them."""

    driver: AsyncHttpDriver
    read: Callable[[str], TrainableGroup]
    """Returns the group with an id, as GroupReader.read does."""
    report: RetrainReport
    hook_hash: str
    limit: SampleSizeLimit
    on_group: Callable[[], None]
    """Called after each group of each epoch."""
    _log_seq: int = 0
    _num_waiting: int = 0
    """Groups that the server has pooled for the next step."""
    _last_step: int = 0
    """Number of the last step that was trained. A crash does not lower it, unless its groups are
    lost."""
    _skipped: set[str] = field(default_factory=set[str])
    _untrained: set[str] = field(default_factory=set[str])
    """Ids of groups that the server pooled and did not train, with the number of their epoch."""

    async def feed(self, group_ids: Sequence[str], epochs: int) -> None:
        """Send all groups to the server `epochs` times, and wait for the training steps.

        Raises UserError if the effective sample size is too low, and FakevllmError if training
        stops for another reason.
        """
        try:
            for epoch in range(1, epochs + 1):
                for group_id in group_ids:
                    if group_id not in self._skipped:
                        await self._add(group_id, epoch)
                    self.on_group()
        finally:
            self.report.num_left = self._num_waiting

    async def _add(self, group_id: str, epoch: int) -> None:
        try:
            group = await asyncio.to_thread(self.read, group_id)
        except NotTrained as reason:
            return self._skip(group_id, str(reason))
        except READ_ERRORS as error:
            return self._skip_broken(BrokenGroup.of(group_id, error))
        request = AddLoggedGroupRequest(
            group_id=f"{group_id}#{epoch}",
            rewards=group.rewards,
            calls=group.calls,
            hook_hash=self.hook_hash,
        )
        try:
            reply = await self.driver.run(server_calls.add_group(request))
        except ServerUnreachable:
            raise
        except SwarmError as error:
            if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                return self._skip(group_id, "too_large")
            if error.status != HTTPStatus.UNPROCESSABLE_ENTITY:
                raise
            return self._skip_broken(BrokenGroup(group_id, error.detail))
        if not (reply.success and reply.pooled):
            self._skip(group_id, reply.failure_reason.partition(":")[0])
        else:
            self.report.num_sent += 1
            self._num_waiting += 1
            if epoch == 1:
                self.report.staleness.add(group.record.run_id, group.versions)
        if reply.is_due:
            await self._finish_step(reply.step)

    async def _finish_step(self, step: int) -> None:
        # A server that restarted trains its last steps again, and names one of these until then.
        step = max(step, self._last_step + 1)
        self._num_waiting = await self.driver.run(server_calls.end_of_step(step))
        while entries := await self.driver.run(server_calls.log_after(self._log_seq)):
            for entry in entries:
                self._log_seq = entry.seq
                self.read_entry(entry)

    def read_entry(self, entry: LogEntry) -> None:
        """Add an entry of the run log (the server's record of its steps) to the report. Raises
        UserError if the effective sample size is too low."""
        for group_id, reason in entry.reasons.items():
            self._count_untrained(group_id, reason.partition(":")[0])
        if entry.kind == "restored":
            self.report.restore(entry.step)
            self.limit.restore(entry.step)
            if entry.reason and entry.lost:  # the lost groups are not trained again
                for group_id in entry.lost:
                    self._count_untrained(group_id, "lost")
                self._last_step = entry.step
        if entry.kind == "step":
            self._last_step = max(self._last_step, entry.step)
            self.report.add_step(entry.step, entry.metrics)
            self.limit.observe(entry.step, entry.metrics)

    def _count_untrained(self, group_id: str, reason: str) -> None:
        """Count a group that the server accepted and did not train. A group that a restarted server
        reports again is not counted again."""
        if group_id not in self._untrained:
            self._untrained.add(group_id)
            self.report.num_sent -= 1
            self.report.skipped[reason] += 1

    def _skip(self, group_id: str, reason: str) -> None:
        if group_id not in self._skipped:
            self._skipped.add(group_id)
            self.report.skipped[reason] += 1

    def _skip_broken(self, broken: BrokenGroup) -> None:
        self._skip(broken.group_id, "unreadable")
        self.report.broken.append(broken)
