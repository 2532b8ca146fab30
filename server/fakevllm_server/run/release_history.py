"""Compute the state of releases from the history of decisions. The state contains the version that
answers apps, the version that is evaluated, and the rejected versions. This module does no I/O.

The history is a list of decisions. Each decision changes the state. Only one part of the state does
not come from decisions: the set of policies that answer apps. A policy is a version that the engine
holds beside the served weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fakevllm_adapters.protocol.releases import Decision
from fakevllm_server.journal.rows import ReleaseRow
from fakevllm_server.run.version_lineage import MODEL, VersionLineage


@dataclass(slots=True)
class ReleaseState:
    """The released version, the candidate, the rejected versions, and whether releases are on hold.

    The candidate is the version that is being evaluated.
    """

    candidate: int | None = None
    rejected: set[int] = field(default_factory=set[int])
    """Versions that must not answer apps."""
    is_held: bool = False
    answering: list[int] = field(default_factory=list[int])
    """Versions that answer apps as policies, such as a baseline. Decisions do not change this
    list."""
    _released: list[int] = field(default_factory=lambda: [MODEL])
    """Versions that were released and are not rejected, oldest first. Version 0, the model itself,
    is always in the list, because it cannot be rejected."""
    _pinned: Sequence[int] = ()

    @property
    def released(self) -> int:
        """Number of the version that answers apps."""
        return self._released[-1]

    @property
    def pinned(self) -> set[int]:
        """Versions whose checkpoints are kept. The pinned versions are:

        * the released version
        * the version that would answer apps if the released version were rejected
        * the candidate (the version that is being evaluated)
        * the versions in the list `pinned` of the latest decision that has such a list
        * the policies (versions that the engine holds beside the served weights) that answer apps
        """
        candidate = [] if self.candidate is None else [self.candidate]
        # An app's version is kept whatever the decisions are.
        return {*self._released[-2:], *candidate, *self._pinned, *self.answering}

    def released_without(self, rejected: set[int]) -> int:
        """Return the version that would answer apps if the versions in `rejected` were rejected."""
        return next(one for one in reversed(self._released) if one not in rejected)

    def apply(self, row: ReleaseRow, lineage: VersionLineage) -> None:
        """Apply `row`, a decision from the history of releases, to the state of releases. For
        example, the decision `released` makes its version the released version."""
        version = row.record.version
        match row.record.decision:
            case Decision.CANDIDATE:
                assert version is not None, "a candidate is a version"
                self.rejected -= lineage.twins_of(version)
                self.candidate = version
            case Decision.RELEASED:
                assert version is not None, "a release names its version"
                self.rejected -= lineage.twins_of(version)
                if version in self._released:
                    self._released.remove(version)
                self._released.append(version)
            case Decision.REJECTED:
                self._reject(rejected_by(row, lineage))
            case Decision.UNDECIDED:
                pass
            case Decision.HOLD | Decision.RESUME:
                self.is_held = row.record.decision is Decision.HOLD
        if row.record.decision is not Decision.CANDIDATE and self.candidate == version:
            self.candidate = None
        if row.restored is not None and self.candidate != row.restored:
            self.candidate = None  # its steps were discarded
        if row.pinned is not None:
            self._pinned = row.pinned

    def _reject(self, versions: set[int]) -> None:
        self.rejected |= versions
        self._released = [one for one in self._released if one not in versions]
        if self.candidate in versions:
            self.candidate = None


def rejected_by(row: ReleaseRow, lineage: VersionLineage) -> set[int]:
    """Return all versions that `row` rejects. `row` is a rejection or a rollback.

    Only versions that existed at the decision are rejected, because no later version is trained
    from a rejected version.
    """
    if row.is_rollback:
        assert row.restored is not None, "a rollback names the restored version"
        versions = lineage.descendants(row.restored) - lineage.twins_of(row.restored)
    else:
        assert row.record.version is not None, "a rejection names its version"
        versions = lineage.descendants(row.record.version)
    return {one for one in versions if one <= row.newest} - {MODEL}
