"""The run's log: which steps were planned, trained, undone, which groups were dropped, and what
evaluations came to. Its entries are told to proxies, which keep a cursor: the number of the last
one they have seen.

Every change of a group's state on its way through training goes through here, into the journal.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from fakevllm_adapters.protocol.swarm import LogEntry, TrainedGroup
from fakevllm_server.journal import changes, reads
from fakevllm_server.journal.reads import PlannedBatch, ServedWeights
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.journal.store import Journal
from fakevllm_server.journal.writer import Change
from fakevllm_server.run.client_metrics import MAX_NAME_CHARS, ClientMetrics
from fakevllm_server.run.coverage import additive_metrics

log = logging.getLogger("fakevllm.server")

MAX_ENTRIES = 1_000
"""Entries told at once."""


class RunLog:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        found = journal.read(reads.log_position)
        self._seq = found.last_seq
        self.version = found.version
        """Highest ever published or promised."""
        self.last_step = found.last_step
        """The last step that is trained, as the weights stand."""
        self._served = journal.read(reads.served_weights)
        """None while what is served was given up."""
        self.totals: defaultdict[str, float] = defaultdict(float)
        """Counts of those steps by their metric's name."""
        self._drops: tuple[int, dict[str, int]] | None = None
        """As they were read last, and how far the journal was written then."""
        self._client_metrics = ClientMetrics()
        """Told with the next step."""
        self._count()

    def record_client_metrics(self, metrics: Mapping[str, float | Sequence[float]]) -> None:
        """By a client, in an episode that ended."""
        refused = self._client_metrics.add(metrics)
        if refused:
            told = len(refused), refused[0][:MAX_NAME_CHARS]
            log.warning("%d log_metrics are not kept, for there are too many: %r and so on", *told)

    async def record_plan(self, batch: PlannedBatch) -> None:
        await self._journal.write(_planned(batch))

    async def record_step(
        self,
        step: int,
        version: int,
        groups: list[TrainedGroup],
        metrics: dict[str, float],
        checkpoint: SavedCheckpoint | None = None,
    ) -> None:
        metrics = metrics | self._client_metrics.take()
        entry = self._next(
            LogEntry(seq=0, kind="step", step=step, version=version, groups=groups, metrics=metrics)
        )
        self.version = max(self.version, version)
        self.last_step = step
        self._add(metrics)
        await self._journal.write(changes.trained(entry, checkpoint))

    async def record_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        await self._journal.write(changes.saved(checkpoint))

    async def record_publication(self, version: int, step: int) -> None:
        self.version = max(self.version, version)
        self._served = ServedWeights(version, step)
        await self._journal.write(changes.published(version, step))

    async def record_rollback(self, step: int, version: int) -> list[PlannedBatch]:
        """The trainer stands at the end of `step`, and will serve as `version`. Returns the batches
        it is to train again, as they were planned."""
        if version == 0:  # nothing was ever trained
            return self._batches(step)
        if step < self._journal.read(reads.last_pruned):  # no batch since can be made again
            self.record_abandoned(step, version, "lost_with_checkpoint")
            await self._journal.write()
        else:
            entry = LogEntry(seq=0, kind="restored", step=step, version=version)
            await self._journal.write(changes.rolled_back(self._next(entry)))
        self.version, self.last_step = max(self.version, version), step
        self._count()
        return self._batches(step)

    def record_abandoned(self, step: int, version: int, reason: str) -> None:
        """Nothing that was trained or planned after `step` will be trained again."""
        if self._served is not None and self._served.step > step:
            self._served = None
        entry = LogEntry(seq=0, kind="restored", step=step, version=version, reason=reason)
        entry.lost = self._journal.read(reads.groups_trained_after, step)
        self._put(changes.abandoned, entry)

    async def record_untrainable_batch(self, batch: PlannedBatch, reason: str) -> None:
        """No trainer took it."""
        self.record_drops(batch.step, {group.group_id: reason for group in batch.groups})
        await self._journal.write(changes.unplanned(batch.step))

    def record_drops(self, step: int, reasons: Mapping[str, str]) -> None:
        if reasons:
            entry = LogEntry(seq=0, kind="dropped", step=step, reasons=dict(reasons))
            self._put(changes.dropped, entry)

    def record_evaluation(self, reward: float, now: float) -> LogEntry | None:
        """Of an evaluation that ends now, for the step whose weights are served; to be written with
        its end, next of all entries. None where they were given up: they are no step's any more."""
        if self._served is None:
            return None
        version, step, told = self._served.version, self._served.step, {"reward": reward}
        return self._next(
            LogEntry(seq=0, kind="evaluated", step=step, version=version, metrics=told, at=now)
        )

    def record_stop(self, step: int, reason: str) -> None:
        """No more steps are taken until the engine is started again."""
        self._put(changes.entry_logged, LogEntry(seq=0, kind="stopped", step=step, reason=reason))

    def steps_since_stop(self) -> list[LogEntry]:
        """The steps since training last stopped, as the weights stand."""
        return self._journal.read(reads.steps_since_stop, self.last_step)

    @property
    def drops(self) -> dict[str, int]:
        """Groups of the run that were dropped and are on disk as such, by the first word of the
        reason. Every client asks several times a second: read again once something was written."""
        reached = self._journal.written_position
        if self._drops is None or self._drops[0] != reached:
            self._drops = reached, self._journal.read(reads.drop_counts)
        return self._drops[1]

    def after(self, seq: int) -> list[LogEntry]:
        """Entries with a higher number, oldest first."""
        return self._journal.read(reads.entries, seq, MAX_ENTRIES) if seq < self._seq else []

    def _batches(self, step: int) -> list[PlannedBatch]:
        corrupt: list[str] = []
        batches = self._journal.read(reads.planned_batches, corrupt)
        self.record_drops(step, dict.fromkeys(corrupt, reads.CORRUPT))
        for batch in batches:
            if not batch.is_whole:
                self._journal.put(_replanned(batch))
        return [batch for batch in batches if batch.groups]

    def _count(self) -> None:
        self.totals.clear()
        for metrics in self._journal.read(reads.step_metrics, self.last_step):
            self._add(metrics)

    def _add(self, metrics: Mapping[str, float]) -> None:
        for name, value in additive_metrics(metrics).items():
            self.totals[name] += value

    def _put(self, change: Callable[[LogEntry], Change], entry: LogEntry) -> None:
        self._journal.put(change(self._next(entry)))

    def _next(self, entry: LogEntry) -> LogEntry:
        self._seq += 1
        return entry.model_copy(update={"seq": self._seq})


def _planned(batch: PlannedBatch) -> Change:
    ids = [group.group_id for group in batch.groups]
    return changes.planned(batch.step, batch.version, ids)


def _replanned(batch: PlannedBatch) -> Change:
    """With the groups it still has."""
    return _planned(batch) if batch.groups else changes.unplanned(batch.step)
