"""Quotas of task mixes: hold each mix to its share of the batches by delaying its new tasks.

Pure; the clock is passed in. It stands still while nobody may claim.

This is weighted fair queueing over tasks. A mix's *pace* is the number of tasks it has completed,
divided by its share. A mix may begin another task if its pace, counting tasks under way as
completed, is not too far ahead of the slowest pace.

Four rules complete this:

* A completed task that waits too long and is dropped does not count, so that another may take its
  place.
* Only mixes that are present are waited for: those that ask, or have episodes under way.
* A mix that was away continues at the pace of the others. It has nothing to catch up on.
* A mix whose tasks all come to nothing is not waited for. Its pace is raised with that of the
  others, and it goes on trying within its share until one of its tasks is pooled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

ASKING_S = 30.0
"""Seconds after its last request during which a mix counts as asking. Clients ask every two
seconds."""
UNDER_WAY_S = 60.0
"""Seconds that a task which lacks episodes stays under way while none of them is running."""

VAIN_PARTS = 4
"""Number of its parts of a batch that must all come to nothing before a mix is not waited for.
Otherwise the others would wait forever for a mix whose tasks are always tied, or whose agent is
broken."""
VAIN_TASKS = 40
"""Least number of tasks for the same. If one task in five is pooled, 40 in a row come to nothing
with a probability of one in seven thousand."""


@dataclass(slots=True)
class _OpenTask:
    last_activity: float
    """When one of its episodes was last claimed, ended or given up."""
    num_running: int = 0
    num_ended: int = 0

    def is_under_way(self, now: float) -> bool:
        return self.num_running > 0 or now - self.last_activity <= UNDER_WAY_S


@dataclass(slots=True)
class _Mix:
    share: float
    num_done: float = 0.0
    num_vain: int = 0
    """Tasks that were dropped or given up since the last one that was pooled."""
    asked_at: float = -math.inf
    open: dict[str, _OpenTask] = field(default_factory=dict[str, _OpenTask])

    @property
    def pace(self) -> float:
        """Completed tasks divided by the share."""
        return self.num_done / self.share

    def is_vain(self, batch_part: float) -> bool:
        """Return whether its tasks come to nothing; `batch_part` is its tasks per batch."""
        return self.num_vain >= max(VAIN_TASKS, VAIN_PARTS * batch_part)

    def begun_pace(self, now: float) -> float:
        """Return completed tasks and tasks under way, divided by the share."""
        num_under_way = sum(task.is_under_way(now) for task in self.open.values())
        return (self.num_done + num_under_way) / self.share

    def is_present(self, now: float) -> bool:
        is_asking = now - self.asked_at <= ASKING_S
        return is_asking or any(task.num_running for task in self.open.values())


class MixQuotas:
    """The mixes of one run of the engine."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._mixes: dict[str, _Mix] = {}
        self._mix_of_task: dict[str, _Mix] = {}
        """The mix that began each open task."""
        self._mix_of_group: dict[str, _Mix] = {}
        """The mix that counts each completed task, by its group, until a step takes the group."""

    def __len__(self) -> int:
        return len(self._mixes)

    def may_begin(self, name: str, share: float, lead: float, task_id: str, now: float) -> bool:
        """Return whether an episode of this task may be claimed.

        `lead` is how far a mix may run ahead of its share, in batches. A task that has begun may
        always get more episodes.
        """
        mix = self._update_mix(name, share, now)
        if task_id in self._mix_of_task:
            return True
        present = [other for other in self._mixes.values() if other.is_present(now)]
        if present == [mix]:
            return True
        tasks_per_share = self._batch_size / sum(other.share for other in present)
        self._raise_vain_mixes(present, tasks_per_share)
        ahead = (mix.begun_pace(now) - min(other.pace for other in present)) * mix.share
        return ahead < max(1.0, lead * tasks_per_share * mix.share)

    def claimed(self, name: str, task_id: str, now: float) -> None:
        """Record that an episode of the task is running."""
        task = self._open_task(self._mixes[name], task_id, now)
        task.num_running += 1
        task.last_activity = now

    def ended(self, claimed_task_id: str, task_id: str, now: float) -> None:
        """Record that an episode was handed in for `task_id`."""
        mix = self._mix_of_task.get(claimed_task_id)
        if mix is not None:
            self._open_task(mix, task_id, now).num_ended += 1
            self.abandoned(claimed_task_id, now)

    def abandoned(self, task_id: str, now: float) -> None:
        """Record that an episode is no longer running.

        If its task has no other episode, it is as if the task had not begun.
        """
        mix = self._mix_of_task.get(task_id)
        if mix is None:
            return
        task = mix.open[task_id]
        task.num_running = max(0, task.num_running - 1)
        task.last_activity = now
        mix.num_vain += self._close_if_empty(task_id)

    def completed(self, task_id: str, group_id: str, *, is_pooled: bool) -> None:
        """Record that a task has all its episodes; those still running belong to its next group.

        A task that is not pooled does not count for its share, so that another may take its place.
        """
        mix = self._mix_of_task.get(task_id)
        if mix is None:
            return
        mix.open[task_id].num_ended = 0
        self._close_if_empty(task_id)
        mix.num_vain = 0 if is_pooled else mix.num_vain + 1
        if is_pooled:
            mix.num_done += 1
            self._mix_of_group[group_id] = mix

    def taken(self, group_id: str) -> None:
        """Record that a step took the group."""
        self._mix_of_group.pop(group_id, None)

    def dropped(self, group_id: str) -> None:
        """Record that a pooled group was dropped: it no longer counts for its share."""
        mix = self._mix_of_group.pop(group_id, None)
        if mix is not None:
            mix.num_done -= 1

    def sweep(self, now: float) -> None:
        """Remove the mixes that are not present. Call it from time to time."""
        gone = [
            name for name, mix in self._mixes.items() if not mix.open and not mix.is_present(now)
        ]
        for name in gone:
            del self._mixes[name]

    def _update_mix(self, name: str, share: float, now: float) -> _Mix:
        mix = self._mixes.setdefault(name, _Mix(share))
        mix.num_done *= share / mix.share  # keep the pace: a new share holds from here on
        mix.share = share
        if not mix.is_present(now):
            others = [other.pace for other in self._mixes.values() if other.is_present(now)]
            furthest = max(other.pace for other in self._mixes.values())
            mix.num_done = max(mix.num_done, min(others, default=furthest) * share)
        mix.asked_at = now
        return mix

    def _raise_vain_mixes(self, present: Sequence[_Mix], tasks_per_share: float) -> None:
        """Raise mixes whose tasks come to nothing to the slowest pace of the others."""
        vain = [mix for mix in present if mix.is_vain(tasks_per_share * mix.share)]
        others = [mix.pace for mix in present if mix not in vain]
        pace = min(others, default=max(mix.pace for mix in present))
        for mix in vain:
            mix.num_done = max(mix.num_done, pace * mix.share)

    def _open_task(self, mix: _Mix, task_id: str, now: float) -> _OpenTask:
        mix = self._mix_of_task.setdefault(task_id, mix)
        return mix.open.setdefault(task_id, _OpenTask(now))

    def _close_if_empty(self, task_id: str) -> bool:
        mix = self._mix_of_task[task_id]
        task = mix.open[task_id]
        is_empty = not task.num_running and not task.num_ended
        if is_empty:
            del mix.open[task_id], self._mix_of_task[task_id]
        return is_empty
