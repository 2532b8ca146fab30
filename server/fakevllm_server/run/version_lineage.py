"""The lineage of the weights' versions. It records from which version each version was trained or
copied. This module does no I/O.

Training is a path of versions, and each training step adds a version to the end of the path.
Training may also go back to an earlier step. The versions after this step then leave the path. The
restored weights get a new version number, and this new version is a copy of the version of the
restored step.

After a crash, the lost batches are trained again. A version that repeats a batch has the same
weights as the version that trained the batch before the crash. The twins of a version are its
copies and its repetitions. A fact about the weights of a version is also true for the version's
twins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from fakevllm_server.journal.rows import VersionChange

MODEL = 0
"""Version of the model's own weights, before any training step."""


class VersionLineage:
    """The lineage of a run's versions. Add the changes in the order of the run log."""

    def __init__(self) -> None:
        self.last_seq = 0
        """Number of the last entry of the run log that was added."""
        self._steps = {MODEL: 0}
        """Maps each version to the training step whose weights it has."""
        self._previous: dict[int, int] = {}
        """For each version, the version from which it was trained or copied."""
        self._next: defaultdict[int, list[int]] = defaultdict(list)
        self._twins: defaultdict[int, list[int]] = defaultdict(list)
        self._copies: defaultdict[int, list[int]] = defaultdict(list)
        """For each version, the twins (versions with the same weights) that were made by a restore.
        The weights of these twins are equal bit by bit."""
        self._restored: set[int] = set()
        """Versions that were made by a restore of earlier weights."""
        self._path = [MODEL]
        self._left: dict[int, int] = {}
        """For each step that a crash has undone and that will be trained again: the version that
        the step had made."""

    def add(self, change: VersionChange) -> None:
        """Add the version that `change` describes. `change` is an entry of the run log."""
        self.last_seq = change.seq
        if not change.is_step:
            if change.restored is None:
                self._leave_after(change.step, change.is_discarding)
            else:
                self._path, self._left = self._path_to(change.restored), {}
            self._restored.add(change.version)
        self._append(change.version, change.step)
        twin = self._left.pop(change.step, None) if change.is_step else None
        if twin is not None:
            _join(self._twins, twin, change.version)
        previous = self._previous[change.version]
        # All versions descend from the model, so its copies have no twins here.
        if not change.is_step and previous != MODEL and self._steps[previous] == change.step:
            _join(self._twins, previous, change.version)
            _join(self._copies, previous, change.version)

    def _leave_after(self, step: int, is_discarding: bool) -> None:
        left = {at: version for at, version in self._left.items() if at > step}
        while self._steps[self._path[-1]] > step:
            version = self._path.pop()
            left[self._steps[version]] = version
        self._left = {} if is_discarding else left

    def _path_to(self, version: int) -> list[int]:
        path = [version]
        while path[-1] != MODEL:
            path.append(self._previous[path[-1]])
        return path[::-1]

    def _append(self, version: int, step: int) -> None:
        previous = self._path[-1]
        self._previous[version] = previous
        self._next[previous].append(version)
        self._steps[version] = step
        self._path.append(version)

    def __contains__(self, version: int) -> bool:
        return version in self._steps

    @property
    def newest(self) -> int:
        """The newest version, which is the version of the current weights."""
        return self._path[-1]

    @property
    def path(self) -> list[int]:
        """The training path: all versions from the initial model to the current weights, oldest
        first."""
        return list(self._path)

    @property
    def undone(self) -> set[int]:
        """Versions whose training steps a crash has undone, and whose batches have not been trained
        again yet."""
        return set(self._left.values())

    def step_of(self, version: int) -> int:
        """Return the training step of a known version."""
        return self._steps[version]

    def common_version(self, version: int) -> int:
        """Return the newest version on the training path that `version` descends from. The training
        path is the sequence of versions that led to the current weights. If `version` is on the
        path, return `version` itself."""
        path = set(self._path)
        while version not in path:
            version = self._previous[version]
        return version

    def parent_of(self, version: int) -> int:
        """Return the version from which the training of `version` began. The result is the version
        whose weights were restored in the latest restore before `version`. If there was no such
        restore, return 0, the version of the initial model."""
        while version not in self._restored and version != MODEL:
            version = self._previous[version]
        return self._previous.get(version, MODEL)

    def twins_of(self, version: int) -> set[int]:
        """Return the versions that have the same weights as `version`, because of a restore, or
        because a step was trained again with the same batch. The result contains the version
        itself."""
        if self._steps[version] == 0:
            return {one for one, step in self._steps.items() if step == 0}
        return _reached(version, self._twins)

    def copies_of(self, version: int) -> set[int]:
        """Return the versions whose weights are equal to the weights of `version` bit by bit,
        because of a restore. The result contains the version itself. All versions of step 0 have
        the weights of the initial model.

        >>> lineage = VersionLineage()
        >>> lineage.add(VersionChange(1, version=1, step=1, is_step=True))
        >>> lineage.add(VersionChange(2, version=2, step=1, is_step=False))  # a restart
        >>> lineage.copies_of(1), lineage.copies_of(0)
        ({1, 2}, {0})
        """
        if self._steps.get(version) == 0:
            return {one for one, step in self._steps.items() if step == 0}
        return _reached(version, self._copies)

    def on_path(self, version: int) -> int:
        """Return the oldest version on the training path that has the same weights as `version`.
        The training path is the sequence of versions that led to the current weights. If no version
        on the path has these weights, return `version` itself."""
        twins = self.twins_of(version)
        return next((one for one in self._path if one in twins), version)

    def first_after(self, version: int, but: Set[int]) -> int | None:
        """Return the first version after `version` on the training path (the versions that led to
        the current weights) that is not in `but`. Return None if no such version exists, or if
        `version` is not on the path."""
        later = self._path[self._path.index(version) + 1 :] if version in self._path else []
        return next((one for one in later if one not in but), None)

    def descendants(self, version: int) -> set[int]:
        """Return a version, its twins (versions with the same weights), and all versions that were
        trained from these versions."""
        return _reached(version, self._next, self._twins)


def _join(edges: defaultdict[int, list[int]], one: int, other: int) -> None:
    edges[one].append(other)
    edges[other].append(one)


def _reached(version: int, *edges: Mapping[int, Sequence[int]]) -> set[int]:
    found: set[int] = set()
    waiting = [version]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            for each in edges:
                waiting += each.get(one, ())
    return found
