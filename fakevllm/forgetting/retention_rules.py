"""Decide which groups' contents are pruned. A group is a request with the answers that were sampled
for it. The module does no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fakevllm.ledger.records import State
from fakevllm.ledger.stored_groups import StoredGroup
from fakevllm_adapters.privacy.settings import PrivacySettings

DAY_S = 86_400.0
BYTES_PER_MB = 1_000_000
SHARE_KEPT = 0.95
"""Share of `max_ledger_mb` to which a ledger that is too large is reduced. The rest is space for
new groups, so that not every new group causes a search for groups to prune."""
IN_USE = frozenset({State.SCORED.value, State.POOLED.value})
"""States of groups that the server may still train."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The facts that decide which groups (requests with their answers) are pruned: the time, the
    size of the ledger (the proxy's database), and the open evaluations."""

    now: float
    """Unix seconds."""
    num_bytes: int
    """Size of the ledger's content."""
    open_evaluations: Collection[str] = ()
    """Ids of the evaluations that the release gate has begun and not decided."""


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The limits on age and size that decide which groups' contents are deleted.

    >>> group = StoredGroup("g", received_at=0.0, num_bytes=10, state="trained")
    >>> rules = RetentionRules(PrivacySettings(retention_days=1))
    >>> rules.choose([group], Moment(now=2 * DAY_S, num_bytes=0), limit=5)
    ['g']
    >>> rules.choose([group], Moment(now=DAY_S / 2, num_bytes=0), limit=5)
    []
    """

    settings: PrivacySettings

    @property
    def are_set(self) -> bool:
        """True if the settings limit the age or the total size of stored contents. If not, these
        rules never delete anything."""
        return self.settings.retention_days is not None or self.settings.max_ledger_mb is not None

    def choose(self, groups: Iterable[StoredGroup], moment: Moment, limit: int) -> list[str]:
        """Return the ids of the groups (requests with their answers) whose contents must be
        deleted, at most `limit` ids. `groups` are the groups that have contents, oldest first. The
        method reads `groups` only until the choice is complete.

        Groups that are too old are chosen. If the ledger (the proxy's database) is too large, the
        oldest groups are chosen too, until enough contents would be deleted. Groups whose contents
        are still needed are left out.
        """
        chosen: list[str] = []
        excess = self._excess(moment.num_bytes)
        for group in groups:
            is_old = self._is_old(group, moment.now)
            if len(chosen) == limit or not (is_old or excess > 0):
                break
            if not is_needed(group, moment):
                chosen.append(group.group_id)
                excess -= group.num_bytes
        return chosen

    def is_too_large(self, num_bytes: int) -> bool:
        """Return True if a ledger (the proxy's database) with `num_bytes` bytes of content is above
        the size limit."""
        limit = self.settings.max_ledger_mb
        return limit is not None and num_bytes > limit * BYTES_PER_MB

    def _is_old(self, group: StoredGroup, now: float) -> bool:
        days = self.settings.retention_days
        return days is not None and group.received_at < now - days * DAY_S

    def _excess(self, num_bytes: int) -> float:
        limit = self.settings.max_ledger_mb
        if limit is None or not self.is_too_large(num_bytes):
            return 0.0
        return num_bytes - SHARE_KEPT * limit * BYTES_PER_MB


def is_needed(group: StoredGroup, moment: Moment) -> bool:
    """Return True if the contents of a group are still needed, so that the group must not be
    pruned:

    * The server may still train the group, or feedback about the group's answer.
    * A retry of the request may still get the group's answer.
    * The group belongs to an evaluation of new weights, and the decision whether to release these
      weights is still open.
    """
    is_kept = group.kept_until is not None and group.kept_until > moment.now
    is_evaluated = group.eval_id is not None and group.eval_id in moment.open_evaluations
    return group.state in IN_USE or group.has_open_feedback or is_kept or is_evaluated
