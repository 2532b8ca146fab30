"""Quotas of mixes (named kinds of tasks, such as "math"). The quotas hold each mix to its share of
the batches by delaying new tasks of mixes that are ahead.

This module does no I/O. The caller passes in the time of a clock that runs only while clients may
claim episodes.

The algorithm is weighted fair queueing over tasks. A mix's *pace* is the number of tasks it has
completed, divided by its share. A mix may begin another task if its pace is not too far ahead of
the slowest pace of the mixes. In this comparison, tasks that the mix has begun count as completed.

Four more rules apply:

* A completed task may be dropped before it is trained. A dropped task no longer counts as
  completed, so its mix may begin another task instead.
* Mixes wait only for mixes that are present. A mix is present if clients request claims for it, or
  if it has running episodes.
* A mix that was absent continues at the pace of the present mixes. It does not make up for the
  tasks that it missed.
* A mix is *unproductive* if many of its tasks in a row were not pooled (accepted for training).
  Other mixes do not wait for an unproductive mix: its pace is raised to the slowest pace of the
  other mixes. The unproductive mix may still begin tasks within its share, and is productive again
  when one of its tasks is pooled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

REQUESTING_S = 30.0
"""Clients count as requesting claims for a mix if the mix's last claim request is at most this
number of seconds ago. Waiting clients send a request every two seconds."""
UNDER_WAY_S = 60.0
"""A begun task without running episodes counts as under way if its last activity is at most this
number of seconds ago."""

UNPRODUCTIVE_BATCHES = 4
"""A mix is unproductive after this number of batches without a pooled task. The batches are counted
in tasks: UNPRODUCTIVE_BATCHES times the mix's tasks per batch. Without this limit, the other mixes
would wait forever for a mix whose tasks are always tied or whose agent is broken."""
MIN_UNPRODUCTIVE_TASKS = 40
"""A mix is unproductive only if at least this number of its tasks in a row were not pooled. If on
average one task in five is pooled, the probability of 40 unpooled tasks in a row is 1 in 7000."""


@dataclass(slots=True)
class _OpenTask:
    last_activity: float
    """Time at which an episode of the task was last claimed, ended or aborted."""
    num_running: int = 0
    """Number of running episodes."""
    num_ended: int = 0
    """Number of ended episodes that wait for the task's other episodes."""

    def is_under_way(self, now: float) -> bool:
        return self.num_running > 0 or now - self.last_activity <= UNDER_WAY_S


@dataclass(slots=True)
class _Mix:
    share: float
    num_done: float = 0.0
    """Number of completed tasks. The number is adjusted when the share changes or the pace is
    raised."""
    num_not_pooled: int = 0
    """Number of tasks that were dropped or aborted since a task was last pooled."""
    last_request: float = -math.inf
    """Time of the last claim request."""
    open: dict[str, _OpenTask] = field(default_factory=dict[str, _OpenTask])

    @property
    def pace(self) -> float:
        """Number of completed tasks of the mix (a named kind of tasks), divided by the mix's share
        of a batch."""
        return self.num_done / self.share

    def is_unproductive(self, tasks_per_batch: float) -> bool:
        """Return True if other mixes (named kinds of tasks) should not wait for this mix. This is
        the case if many of its tasks in a row were not pooled (accepted for training).

        `tasks_per_batch` is the mix's share of a batch, in tasks.
        """
        limit = max(MIN_UNPRODUCTIVE_TASKS, UNPRODUCTIVE_BATCHES * tasks_per_batch)
        return self.num_not_pooled >= limit

    def begun_pace(self, now: float) -> float:
        """Return the number of tasks that the mix (a named kind of tasks) has completed or begun,
        divided by the mix's share of a batch."""
        num_under_way = sum(task.is_under_way(now) for task in self.open.values())
        return (self.num_done + num_under_way) / self.share

    def is_present(self, now: float) -> bool:
        """Return True if clients have lately tried to claim episodes of the mix (a named kind of
        tasks), or if the mix has running episodes. A mix that is ahead of its share waits only for
        mixes that are present."""
        is_requesting = now - self.last_request <= REQUESTING_S
        return is_requesting or any(task.num_running for task in self.open.values())


class MixQuotas:
    """The quotas and task counts of all mixes (named kinds of tasks), for one run of the engine."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._mixes: dict[str, _Mix] = {}
        self._mix_of_task: dict[str, _Mix] = {}
        """Maps the id of each open task to the mix that began the task."""
        self._mix_of_group: dict[str, _Mix] = {}
        """Maps the id of each pooled group to the mix for which the group's task counts as
        completed. The entry is removed when a step takes the group or when the group is dropped."""

    def __len__(self) -> int:
        return len(self._mixes)

    def may_begin(self, name: str, share: float, lead: float, task_id: str, now: float) -> bool:
        """Return True if a client may claim an episode of this task. The task belongs to the mix
        (the named kind of tasks) `name`.

        `share` is the mix's share of each batch. `lead` is how far the mix may run ahead of its
        share, in batches. If the task has begun already, the result is always True.
        """
        mix = self._update_mix(name, share, now)
        if task_id in self._mix_of_task:
            return True
        present = [other for other in self._mixes.values() if other.is_present(now)]
        if present == [mix]:
            return True
        tasks_per_share = self._batch_size / sum(other.share for other in present)
        self._raise_unproductive_mixes(present, tasks_per_share)
        ahead = (mix.begun_pace(now) - min(other.pace for other in present)) * mix.share
        return ahead < max(1.0, lead * tasks_per_share * mix.share)

    def claimed(self, name: str, task_id: str, now: float) -> None:
        """Record that a client claimed an episode of this task. The episode counts as running."""
        task = self._open_task(self._mixes[name], task_id, now)
        task.num_running += 1
        task.last_activity = now

    def ended(self, claimed_task_id: str, task_id: str, now: float) -> None:
        """Record the end of an episode. `claimed_task_id` is the task for which the client claimed
        the episode. `task_id` is the task for which the client submitted the result. It may differ
        from `claimed_task_id`."""
        mix = self._mix_of_task.get(claimed_task_id)
        if mix is not None:
            self._open_task(mix, task_id, now).num_ended += 1
            self.abandoned(claimed_task_id, now)

    def abandoned(self, task_id: str, now: float) -> None:
        """Record that an episode of the task no longer runs and has given no result.

        If the task has no other episode, the task no longer counts as begun.
        """
        mix = self._mix_of_task.get(task_id)
        if mix is None:
            return
        task = mix.open[task_id]
        task.num_running = max(0, task.num_running - 1)
        task.last_activity = now
        mix.num_not_pooled += self._close_if_empty(task_id)

    def completed(self, task_id: str, group_id: str, *, is_pooled: bool) -> None:
        """Record that the group of a task is complete. Also record whether the group was pooled
        (accepted for training).

        A task that is not pooled does not count for the share of its mix (a named kind of tasks).
        The mix may therefore begin another task instead.

        Episodes of the task that are still running belong to the task's next group.
        """
        mix = self._mix_of_task.get(task_id)
        if mix is None:
            return
        mix.open[task_id].num_ended = 0
        self._close_if_empty(task_id)
        mix.num_not_pooled = 0 if is_pooled else mix.num_not_pooled + 1
        if is_pooled:
            mix.num_done += 1
            self._mix_of_group[group_id] = mix

    def taken(self, group_id: str) -> None:
        """Record that a training step took the group with this id. The group's task then stays
        counted as completed, even if `dropped` is called for the group later."""
        self._mix_of_group.pop(group_id, None)

    def dropped(self, group_id: str) -> None:
        """Record that a pooled group (a group that was accepted for training) was dropped. Its task
        then no longer counts for the share of its mix (a named kind of tasks)."""
        mix = self._mix_of_group.pop(group_id, None)
        if mix is not None:
            mix.num_done -= 1

    def sweep(self, now: float) -> None:
        """Remove the mixes (named kinds of tasks) that have no begun task and for which no client
        has requested a claim lately. Call this method periodically."""
        absent = [
            name for name, mix in self._mixes.items() if not mix.open and not mix.is_present(now)
        ]
        for name in absent:
            del self._mixes[name]

    def _update_mix(self, name: str, share: float, now: float) -> _Mix:
        """Record that a client wants to claim an episode of a mix (a named kind of tasks). Set the
        mix's share to `share`, and return the mix. The pace of a mix is its number of completed
        tasks, divided by its share. If the mix was absent, raise its pace to the slowest pace of
        the present mixes."""
        mix = self._mixes.setdefault(name, _Mix(share))
        mix.num_done *= share / mix.share  # keeps the pace: a new share affects only later tasks
        mix.share = share
        if not mix.is_present(now):
            others = [other.pace for other in self._mixes.values() if other.is_present(now)]
            furthest = max(other.pace for other in self._mixes.values())
            mix.num_done = max(mix.num_done, min(others, default=furthest) * share)
        mix.last_request = now
        return mix

    def _raise_unproductive_mixes(self, present: Sequence[_Mix], tasks_per_share: float) -> None:
        """Raise the pace of unproductive mixes (named kinds of tasks) to the slowest pace of the
        productive mixes. The pace is the number of completed tasks, divided by the mix's share. No
        mix then waits for an unproductive mix."""
        unproductive = [mix for mix in present if mix.is_unproductive(tasks_per_share * mix.share)]
        others = [mix.pace for mix in present if mix not in unproductive]
        pace = min(others, default=max(mix.pace for mix in present))
        for mix in unproductive:
            mix.num_done = max(mix.num_done, pace * mix.share)

    def _open_task(self, mix: _Mix, task_id: str, now: float) -> _OpenTask:
        """Return the numbers of running and ended episodes of the task with this id. If there are
        no such numbers yet, the task begins now, as a task of `mix`. A mix is a named kind of
        tasks."""
        mix = self._mix_of_task.setdefault(task_id, mix)
        return mix.open.setdefault(task_id, _OpenTask(now))

    def _close_if_empty(self, task_id: str) -> bool:
        """Forget the task if it has neither a running nor an ended episode. Return True if the task
        was forgotten."""
        mix = self._mix_of_task[task_id]
        task = mix.open[task_id]
        is_empty = not task.num_running and not task.num_ended
        if is_empty:
            del mix.open[task_id], self._mix_of_task[task_id]
        return is_empty
