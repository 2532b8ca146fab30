"""The versions of the hooks that are in use, and the groups that use them. This module does no I/O.

A group (a request with its sampled answers) takes the version of the hooks that is current when the
group begins. The group keeps this version until the group's reward is final. An older version is
dropped when no group uses it any more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class Use(Enum):
    """The purpose for which a group (a request with its sampled answers) uses the hooks. A group
    keeps its version of the hooks until all its uses have ended."""

    REQUEST = "request"
    """The request is planned, sampled and answered."""
    SIBLINGS = "siblings"
    """Siblings are sampled and scored, perhaps after the app has its answer."""
    FEEDBACK = "feedback"
    """The scored group waits for feedback, which `on_feedback` may add to the reward."""
    CALL = "call"
    """A single call of a hook, for feedback or for an evaluation. Several such calls may run for
    one group."""


@dataclass(slots=True)
class _Lease:
    version: int
    uses: Counter[Use] = field(default_factory=Counter[Use])


class VersionLeases:
    """The versions of the hooks that are in use. Each new version has a higher number than the
    version before.

    >>> leases = VersionLeases()
    >>> leases.begin("g1", Use.REQUEST), leases.switch(), leases.begin("g2", Use.REQUEST)
    (0, [], 1)
    >>> leases.end("g1", Use.REQUEST)
    [0]
    """

    def __init__(self) -> None:
        self.current = 0
        """Number of the version that new groups use."""
        self._leases: dict[str, _Lease] = {}
        """Leases by group id. Bounded by the number of open groups."""
        self._num_groups = {0: 0}
        """Number of groups that use a version, for each version that is in use."""

    @property
    def num_open(self) -> int:
        """Number of versions of the hooks that are in use, including the current version."""
        return len(self._num_groups)

    def begin(self, group_id: str, use: Use) -> int:
        """Record that a group (a request with its answers) uses the hooks for the purpose `use`.
        Return the group's version of the hooks. A group that does not use the hooks yet gets the
        current version."""
        lease = self._leases.get(group_id)
        if lease is None:
            lease = self._leases[group_id] = _Lease(self.current)
            self._num_groups[self.current] += 1
        lease.uses[use] += 1
        return lease.version

    def version_of(self, group_id: str | None) -> int:
        """Return the version of the hooks that a group (a request with its answers) uses. If the
        group does not use the hooks, return the current version."""
        lease = self._leases.get(group_id or "")
        return self.current if lease is None else lease.version

    def end(self, group_id: str, use: Use) -> list[int]:
        """Record that a group (a request with its answers) no longer uses the hooks for one
        purpose. If no such use was recorded, change nothing. Return the versions that no group uses
        any more because of this call."""
        lease = self._leases.get(group_id)
        if lease is None:
            return []
        lease.uses -= Counter([use])  # drops a use that ends
        if lease.uses:
            return []
        del self._leases[group_id]
        self._num_groups[lease.version] -= 1
        return self._take_ended()

    def switch(self) -> list[int]:
        """Make a new version of the hooks the current one. Return the older versions of the hooks
        that no group (a request with its answers) uses."""
        self.current += 1
        self._num_groups[self.current] = 0
        return self._take_ended()

    def _take_ended(self) -> list[int]:
        ended = [
            version
            for version, num in self._num_groups.items()
            if num == 0 and version != self.current
        ]
        for version in ended:
            del self._num_groups[version]
        return ended
