"""The history of releases of a run. The history contains all decisions about versions of the
weights, in the order in which the journal (the server's SQLite file) recorded them. The state of
releases follows from the history."""

from __future__ import annotations

import copy
import json

from sqlalchemy import Connection

from fakevllm_adapters.protocol.releases import Decision, ReleasesReply
from fakevllm_server.journal import reads, row_changes
from fakevllm_server.journal.rows import (
    ANSWERING,
    TRAINING_LIMIT,
    ReleaseRow,
    TrainingReturn,
)
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.log import RunLog
from fakevllm_server.run.release_history import ReleaseState
from fakevllm_server.run.version_lineage import MODEL, VersionLineage

MAX_ANSWERING = 2
"""Maximum number of versions that answer apps as policies at the same time: the released version
and the baseline."""


def read_state(db: Connection) -> ReleaseState:
    """Return the state of releases that follows from the decisions in a journal. The state contains
    the released version, the candidate (the version that is being evaluated) and the rejected
    versions."""
    state, lineage = ReleaseState(answering=reads.answering_versions(db)), VersionLineage()
    rows = reads.releases(db)
    for change in reads.version_changes(db, 0) if rows else []:
        lineage.add(change)
    for row in rows:
        state.apply(row, lineage)
    return state


class Releases:
    """The history of releases of a run: all decisions about versions of the weights. The newest
    decisions may not be on disk yet."""

    def __init__(self, journal: Journal, runlog: RunLog) -> None:
        self._journal = journal
        self._log = runlog
        self._lineage = VersionLineage()
        self._rows: list[ReleaseRow] = []
        self.state = ReleaseState(answering=journal.read(reads.answering_versions))
        for row in journal.read(reads.releases):
            self._add(row)
        self.training_limit = journal.read(reads.training_limit)
        """Newest version that training may make, or None if there is no limit."""

    def lineage(self) -> VersionLineage:
        """Return the lineage of the run's versions. The lineage records from which version each
        version was trained. Only entries of the run log that are on disk are included."""
        for change in self._journal.read(reads.version_changes, self._lineage.last_seq):
            self._lineage.add(change)
        return self._lineage

    def rejected(self) -> set[int]:
        """Return the versions that must not answer apps, because they were rejected."""
        return self.state.rejected

    def set_answering(self, version: int, is_answering: bool) -> None:
        """Record whether a version answers apps as a policy (a version that the engine holds beside
        the served weights). The checkpoint of such a version is kept, also after a restart. When
        the version no longer answers apps, its checkpoint is no longer kept for this reason.
        Checkpoints are kept only for the MAX_ANSWERING versions that were recorded last."""
        before = self.state.answering
        others = [one for one in before if one != version]
        is_kept = is_answering and version != MODEL  # the model itself has no checkpoint
        self.state.answering = [*others, version][-MAX_ANSWERING:] if is_kept else others
        if set(before) != set(self.state.answering):  # and not each minute
            value = json.dumps(self.state.answering)
            self._journal.put(row_changes.meta_set(ANSWERING, value))

    async def limit_training(self, version: int | None) -> None:
        """Set the newest version that training may make. With None, remove this limit. Return when
        the change is on disk. Raise JournalError if the disk is slow or the journal cannot be
        written."""
        self.training_limit = version
        value = None if version is None else str(version)
        position = self._journal.put(row_changes.meta_set(TRAINING_LIMIT, value))
        await self._journal.wait_written(position)

    @property
    def num_records(self) -> int:
        return len(self._rows)

    def find(self, id: str) -> ReleaseRow | None:
        """Return the decision about a version that was made for the request with this id. Return
        None if there is no such decision."""
        return next((row for row in self._rows if row.record.id == id), None)

    async def record(self, row: ReleaseRow) -> None:
        """Append a decision about a version to the journal (the server's SQLite file). Return when
        the decision is on disk. Raise JournalError if the journal cannot be written."""
        self._lower_limit(row)
        position = self._journal.put(row_changes.release_decided(row))
        self._add(row)
        await self._journal.wait_written(position, None)

    def pinned_after(self, row: ReleaseRow) -> set[int]:
        """Return the versions that will be pinned after the decision `row`. The checkpoints of
        pinned versions are kept."""
        state = copy.deepcopy(self.state)
        state.apply(row, self.lineage())
        return state.pinned

    async def record_return(self, row: ReleaseRow, back: TrainingReturn) -> None:
        """Append to the journal (the server's SQLite file) a decision by which training goes back
        to an earlier version. Also record the return itself. Return when both are on disk."""
        self._lower_limit(row)
        await self._journal.write()
        position = await self._log.put_return(row, back)
        self._add(row)
        await self._journal.wait_written(position, None)

    def _lower_limit(self, row: ReleaseRow) -> None:
        """If `row` is a release, or a return to an earlier version, lower the training limit to the
        newest existing version. (The training limit is the newest version that training may make.)
        If there is no limit, do nothing.

        After such a decision, the release gate compares new versions with other weights than
        before. Training must wait until the gate has sampled these weights.
        """
        limit, newest = self.training_limit, self._log.version
        is_change = row.record.decision is Decision.RELEASED or row.restored is not None
        if is_change and limit is not None and limit > newest:
            self.training_limit = newest
            self._journal.put(row_changes.meta_set(TRAINING_LIMIT, str(newest)))

    def reply(self) -> ReleasesReply:
        """Return the reply to clients: all decisions about versions, and the state of releases."""
        lineage = self.lineage()
        return ReleasesReply(
            records=[row.record for row in self._rows],
            released=self.state.released,
            candidate=self.state.candidate,
            rejected=sorted(self.state.rejected),
            is_held=self.state.is_held,
            training_limit=self.training_limit,
            released_copies=sorted(lineage.copies_of(self.state.released)),
            newest_copies=sorted(lineage.copies_of(lineage.newest)),
        )

    def _add(self, row: ReleaseRow) -> None:
        self._rows.append(row)
        self.state.apply(row, self.lineage())
