"""The outcomes of live sessions, by which the release gate compares versions. A live session is a
conversation of an app, and has one outcome. An arm is the set of live sessions that one version
answers. This module does no I/O, and gets the time as an argument."""

from __future__ import annotations

import bisect
from collections import OrderedDict

from fakevllm.release.arm_gains import GroupOutcome
from fakevllm.release.arms import Arm
from fakevllm.release.controller import ScoredSession

MAX_SESSIONS = 100_000
"""Maximum number of live sessions that are remembered. A session that is no longer remembered is
counted again when it has a further group."""
MAX_PUBLISHES = 1000
"""Maximum number of publishes (new versions of the weights) whose times are kept. A group that
began before the oldest of these times does not count."""


class LiveSessions:
    """The outcomes of live sessions, computed from scored groups (requests with their answers). The
    outcome of a session is the mean reward of its first group that was answered by a known version.
    A new comparison of live sessions begins with each verdict of the release gate about a
    version."""

    def __init__(self) -> None:
        self._comparison = 0
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._publishes: list[tuple[float, int]] = []
        """Unix time at which each version was first seen, with the version."""

    def published(self, version: int, now: float) -> None:
        """Record that `version` is the newest version at the time `now`, in Unix seconds."""
        if not self._publishes or self._publishes[-1][1] != version:
            self._publishes.append((now, version))
            del self._publishes[:-MAX_PUBLISHES]

    def begin(self, comparison: int) -> None:
        """Begin a new comparison of live sessions, in which each session may count once.
        `comparison` is the number of the release gate's latest verdict. If this comparison has
        already begun, do nothing."""
        if comparison != self._comparison:
            self._comparison = comparison
            self._seen.clear()

    def add(self, group: GroupOutcome) -> ScoredSession | None:
        """Return the outcome of the session to which `group` belongs, if the session counts in the
        comparison. Return None in three cases: the session was counted already, its arm is not
        compared, or the group is in the training arm and its version is not known."""
        if group.arm not in (Arm.TRAINING, Arm.RELEASED) or group.root in self._seen:
            return None
        version = None
        if group.arm is Arm.TRAINING:
            # A version that was published while the group was sampled may have answered too. The
            # older version counts. Else a successor could be credited for a rejected version.
            position = bisect.bisect_right(self._publishes, (group.received_at, 1 << 62))
            if position == 0:
                return None
            version = self._publishes[position - 1][1]
        self._seen[group.root] = None
        if len(self._seen) > MAX_SESSIONS:
            self._seen.popitem(last=False)
        return ScoredSession(version, group.mean)
