"""The run log: steps that were trained or rolled back, dropped groups, and evaluations.

Every change of a group's state during training is recorded here and written to the journal (the
server's SQLite file). Proxies read the entries of the log. A proxy keeps a cursor: the number of
the last entry that it has read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fakevllm_adapters.protocol.forgetting import FORGOTTEN
from fakevllm_adapters.protocol.reward_changes import RewardChanges
from fakevllm_adapters.protocol.swarm import LogEntry, TrainedGroup
from fakevllm_server.episodes.group_filter import REJECTED_VERSION
from fakevllm_server.journal import reads, row_changes
from fakevllm_server.journal.group_commit_writer import Change
from fakevllm_server.journal.reads import PlannedBatch, ServedWeights
from fakevllm_server.journal.rows import ReleaseRow, SavedCheckpoint, TrainingReturn
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.client_metrics import MAX_NAME_CHARS, ClientMetrics
from fakevllm_server.run.trained_token_share import additive_metrics
from fakevllm_server.types.drop_reasons import DropReason

log = logging.getLogger("fakevllm.server")

MAX_ENTRIES = 1_000
"""Maximum number of entries that `RunLog.entries_after` returns."""


@dataclass(frozen=True, slots=True)
class RewardSource:
    """The origin of a training step's rewards: the reward hooks that gave them, and the job."""

    hooks: list[str]
    """Digests of the hook files; empty if none is known."""
    job: str
    """Digest of the job; empty if it is unknown."""
    changed: str
    """What changed since the step before, in plain words; empty if nothing changed."""


UNKNOWN_SOURCE = RewardSource([], "", "")
"""Source of rewards whose hooks and job are unknown."""


class RunLog:
    """Writes the entries of the run log, and keeps the run's totals. The totals are metrics summed
    over all training steps."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        position = journal.read(reads.log_position)
        self._seq = position.last_seq
        self.version = position.version
        """Highest version that was ever published or recorded in the run log."""
        self.last_step = position.last_step
        """The last step that the current weights were trained in."""
        self._served = journal.read(reads.served_weights)
        """The served weights; None if the steps that trained them were rolled back for good."""
        self.totals: defaultdict[str, float] = defaultdict(float)
        """Sums of the additive metrics over the steps up to `last_step`."""
        self._drops: tuple[int, dict[str, int]] | None = None
        """Two values: the position up to which the journal was written when the dropped groups were
        counted, and the numbers of dropped groups by reason."""
        self._client_metrics = ClientMetrics()
        """The clients' metrics, which are logged with the next step."""
        self._reward_changes = RewardChanges()
        self._update_totals()

    def record_client_metrics(self, metrics: Mapping[str, float | Sequence[float]]) -> None:
        """Keep the metrics that a client sent with an ended episode, and log them with the next
        training step."""
        refused = self._client_metrics.add(metrics)
        if refused:
            log.warning(
                "%d names in log_metrics were refused because there are too many or they are too "
                "long; the first is %r",
                len(refused),
                refused[0][:MAX_NAME_CHARS],
            )

    def discard_client_metrics(self) -> None:
        """Discard the metrics that clients have sent since the last training step."""
        self._client_metrics.take()

    async def record_plan(self, batch: PlannedBatch) -> None:
        """Write the batch of the next training step to the journal (the server's SQLite file)."""
        await self._journal.write(_plan_change(batch))

    def observe_source(self, hooks: Iterable[str], job: str) -> RewardSource:
        """Return the origin of the rewards of the next training step: the reward hooks and the
        training job. The field `changed` of the result says what has changed since the previous
        step. Call this method once for each step, before `record_step`.

        `hooks` are the digests of the hooks that gave the rewards, one for each group. An empty
        digest means that the hooks are unknown. `job` is the digest of the job.
        """
        known = sorted(set(filter(None, hooks)))
        return RewardSource(known, job, self._reward_changes.observe(known, [job]))

    async def record_step(
        self,
        step: int,
        version: int,
        groups: list[TrainedGroup],
        metrics: dict[str, float],
        checkpoint: SavedCheckpoint | None = None,
        source: RewardSource = UNKNOWN_SOURCE,
    ) -> None:
        """Write a trained step to the journal (the server's SQLite file). If a checkpoint of the
        step was saved, record the checkpoint too.

        `version` is the version of the new weights. `groups` are the groups that were trained.
        `source` is the result of `observe_source` for this step.
        """
        metrics = metrics | self._client_metrics.take()
        entry = self._next(
            LogEntry(
                seq=0,
                kind="step",
                step=step,
                version=version,
                groups=groups,
                metrics=metrics,
                hooks=source.hooks,
                job=source.job,
                changed=source.changed,
            )
        )
        self.version = max(self.version, version)
        self.last_step = step
        _add(self.totals, metrics)
        await self._journal.write(row_changes.trained(entry, checkpoint))

    async def record_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        """Record in the journal (the server's SQLite file) a checkpoint whose files are complete on
        disk."""
        await self._journal.write(row_changes.saved(checkpoint))

    async def record_publication(self, version: int, step: int) -> None:
        """Record in the journal (the server's SQLite file) that the rollout engine now serves the
        weights of `step`, under the version number `version`."""
        self.version = max(self.version, version)
        self._served = ServedWeights(version, step)
        await self._journal.write(row_changes.published(version, step))

    async def record_rollback(self, step: int, version: int) -> list[PlannedBatch]:
        """Record that the trainer was restored to the state at the end of `step`. The restored
        weights will be served as `version`.

        Return the planned batches of the later steps. These batches must be trained again. If the
        journal has already deleted a batch of these steps, record instead that the later steps are
        not trained again.
        """
        if version == 0:  # no step was ever trained
            return self._read_batches(step)
        if step < self._journal.read(reads.last_pruned):  # later batches were deleted
            self.record_abandoned(step, version, DropReason.LOST_WITH_CHECKPOINT.value)
            await self._journal.write()
        else:
            entry = LogEntry(seq=0, kind="restored", step=step, version=version)
            await self._journal.write(row_changes.rolled_back(self._next(entry)))
        self.version, self.last_step = max(self.version, version), step
        self._update_totals()
        return self._read_batches(step)

    async def record_reload(self, version: int) -> None:
        """Record in the run log that the weights of the last step get a new version number. Call
        this method before the weights are served as this version. Otherwise a call could be sampled
        by a version that is not recorded."""
        entry = LogEntry(seq=0, kind="restored", step=self.last_step, version=version)
        self.version = max(self.version, version)
        await self._journal.write(row_changes.entry_logged(self._next(entry)))

    def record_abandoned(
        self, step: int, version: int, reason: str, kept: Collection[int] = ()
    ) -> None:
        """Record that the run continues from the end of `step`. The batches of later steps are
        discarded for good. The checkpoints of the versions in `kept` are kept as side checkpoints
        (checkpoints of versions that are not part of the run).

        The groups of the discarded batches are not trained again, whether they were already trained
        or only planned.
        """
        entry = self._next(self._abandon(step, version, reason, self._lost_after(step)))
        self._journal.put(row_changes.abandoned(entry, kept))

    async def put_return(self, row: ReleaseRow, back: TrainingReturn) -> int:
        """Queue a release decision with which training goes back to an earlier version. Return the
        decision's position in the queue of the journal (the server's SQLite file). The steps that
        are undone are not trained again, and the restored weights get the next version. Before this
        call, all earlier changes of the journal must be on disk."""
        # In a thread: the entries of thousands of steps are parsed, and apps are served meanwhile.
        lost = await asyncio.to_thread(self._lost_after, back.common_step)
        totals = await asyncio.to_thread(self._read_totals, back.step)
        entry = self._abandon(back.common_step, self.version + 1, REJECTED_VERSION, lost)
        entry = self._next(entry.model_copy(update={"step": back.step}))
        self.version, self.last_step = entry.version, back.step
        self.totals, self._reward_changes = totals
        return self._journal.put(row_changes.went_back(entry, row, back))

    def _lost_after(self, step: int) -> list[str]:
        return self._journal.read(reads.groups_trained_after, step)

    def _abandon(self, step: int, version: int, reason: str, lost: list[str]) -> LogEntry:
        if self._served is not None and self._served.step > step:
            self._served = None
        return LogEntry(
            seq=0, kind="restored", step=step, version=version, reason=reason, lost=lost
        )

    async def record_untrainable_batch(self, batch: PlannedBatch, reason: str) -> None:
        """Drop the groups of a planned batch, and delete the batch. Use this method if the trainer
        could not train on the batch."""
        self.record_drops(batch.step, {group.group_id: reason for group in batch.groups})
        await self._journal.write(row_changes.unplanned(batch.step))

    def unplan_batches(self) -> list[str]:
        """Delete from the journal all batches that were planned and are not trained yet. Return the
        ids of their groups. The caller must record these groups as dropped."""
        corrupt: list[str] = []
        batches = self._journal.read(reads.planned_batches, corrupt)
        for batch in batches:
            self._journal.put(row_changes.unplanned(batch.step))
        forgotten = self._journal.read(reads.forgotten_groups)
        return [group.group_id for batch in batches for group in batch.groups] + corrupt + forgotten

    def record_drops(self, step: int, reasons: Mapping[str, str]) -> None:
        """Record in the run log that groups were dropped, so that they are not trained. `reasons`
        maps each group id to the reason."""
        if reasons:
            entry = LogEntry(seq=0, kind="dropped", step=step, reasons=dict(reasons))
            self._put(row_changes.dropped, entry)

    def record_evaluation(self, reward: float, now: float) -> LogEntry | None:
        """Return a log entry for an evaluation (an episode that is not trained) that ends now.
        `now` is in Unix seconds.

        The entry belongs to the training step whose weights are served. The caller must write the
        entry to the journal together with the end of the episode, before any later entry. Return
        None if the step of the served weights was rolled back for good.
        """
        if self._served is None:
            return None
        return self._next(
            LogEntry(
                seq=0,
                kind="evaluated",
                step=self._served.step,
                version=self._served.version,
                metrics={"reward": reward},
                at=now,
            )
        )

    def record_stop(self, step: int, reason: str) -> None:
        """Record in the run log that training stops at `step`, for `reason`, until the engine is
        started again."""
        self._put(
            row_changes.entry_logged, LogEntry(seq=0, kind="stopped", step=step, reason=reason)
        )

    def steps_since_stop(self) -> list[LogEntry]:
        """Return the log entries of the steps that were trained since training last stopped."""
        return self._journal.read(reads.steps_since_stop, self.last_step)

    @property
    def drops(self) -> dict[str, int]:
        """Number of groups that were dropped during the run, for each reason. A reason is
        shortened: it ends before its first colon.

        Only drops that are on disk are counted. Clients poll the numbers several times a second.
        Therefore the journal is read only if it was written since the last read.
        """
        position = self._journal.written_position
        if self._drops is None or self._drops[0] != position:
            self._drops = position, self._journal.look_up(reads.drop_counts)
        return self._drops[1]

    def entries_after(self, seq: int) -> list[LogEntry]:
        """Return up to MAX_ENTRIES entries of the run log whose sequence number is above `seq`,
        oldest first."""
        return self._journal.read(reads.entries, seq, MAX_ENTRIES) if seq < self._seq else []

    def _read_batches(self, step: int) -> list[PlannedBatch]:
        """Return the batches in the journal that were planned but not trained. Groups that cannot
        be read, and groups that were deleted on request, are left out and recorded as dropped."""
        corrupt: list[str] = []
        batches = self._journal.read(reads.planned_batches, corrupt)
        self.record_drops(step, dict.fromkeys(corrupt, reads.CORRUPT))
        forgotten = self._journal.read(reads.forgotten_groups)
        self.record_drops(step, dict.fromkeys(forgotten, FORGOTTEN))
        for batch in batches:
            if not batch.is_whole:
                self._journal.put(_replan_change(batch))
        return [batch for batch in batches if batch.groups]

    def _update_totals(self) -> None:
        self.totals, self._reward_changes = self._read_totals(self.last_step)

    def _read_totals(self, last_step: int) -> tuple[defaultdict[str, float], RewardChanges]:
        totals: defaultdict[str, float] = defaultdict(float)
        for metrics in self._journal.read(reads.step_metrics, last_step):
            _add(totals, metrics)
        changes = RewardChanges()
        for hooks, job in self._journal.read(reads.step_sources, last_step):
            changes.observe(hooks, [job])
        return totals, changes

    def _put(self, change: Callable[[LogEntry], Change], entry: LogEntry) -> None:
        """Give an entry the next sequence number, and queue the journal change that stores the
        entry."""
        self._journal.put(change(self._next(entry)))

    def _next(self, entry: LogEntry) -> LogEntry:
        """Return a copy of a log entry with the next sequence number."""
        self._seq += 1
        return entry.model_copy(update={"seq": self._seq})


def _add(totals: defaultdict[str, float], metrics: Mapping[str, float]) -> None:
    for name, value in additive_metrics(metrics).items():
        totals[name] += value


def _plan_change(batch: PlannedBatch) -> Change:
    ids = [group.group_id for group in batch.groups]
    return row_changes.planned(batch.step, batch.version, ids)


def _replan_change(batch: PlannedBatch) -> Change:
    """Return the change of the journal after corrupt or forgotten groups were removed from a
    planned batch.

    The change plans the batch with the remaining groups. If no group remains, the change deletes
    the batch.
    """
    return _plan_change(batch) if batch.groups else row_changes.unplanned(batch.step)
