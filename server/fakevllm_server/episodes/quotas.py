"""Shares of several kinds of tasks in what is trained, held to by when their tasks may begin. Pure;
the clock is passed in, and stands while nobody may claim.

Weighted fair queueing over tasks: a mix may begin another one while those it has completed and has
under way, over its share, are not too far ahead of what the slowest has completed over its own.
What waited too long to be trained was completed for nothing: another may take its place. Only mixes
that ask, or have episodes under way, are waited for; one that has been away goes on where the
others are, with nothing to make up for. Nor are those waited for whose tasks come to nothing, one
after the other: they are carried along with the others, and try on in their part of what is under
way, until a task of theirs is pooled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

ASKING_S = 30.0
"""How long after it asked a mix still counts as asking; clients ask every two seconds."""
UNDER_WAY_S = 60.0
"""How long a task that lacks episodes is under way when none of them is being played."""

VAIN_PARTS = 4
"""After so many of its parts of a batch that all came to nothing a mix is not waited for: others
would wait for ever where its tasks are always tied, or its agent is broken."""
VAIN_TASKS = 40
"""And after no fewer tasks: where one in five is pooled, so many are in vain one time in seven
thousand."""


@dataclass(slots=True)
class _OpenTask:
    seen_at: float
    """When the last of its episodes was claimed, ended or given up."""
    num_running: int = 0
    num_ended: int = 0

    def is_under_way(self, now: float) -> bool:
        return self.num_running > 0 or now - self.seen_at <= UNDER_WAY_S


@dataclass(slots=True)
class _Mix:
    share: float
    num_done: float = 0.0
    num_vain: int = 0
    """Of its tasks since the last that was pooled: dropped, or given up."""
    asked_at: float = -math.inf
    open: dict[str, _OpenTask] = field(default_factory=dict[str, _OpenTask])

    @property
    def pace(self) -> float:
        """What it has completed, by its share."""
        return self.num_done / self.share

    def gives_nothing(self, its_part: float) -> bool:
        """`its_part`: how many tasks of a batch are its own."""
        return self.num_vain >= max(VAIN_TASKS, VAIN_PARTS * its_part)

    def begun_pace(self, now: float) -> float:
        num_under_way = sum(task.is_under_way(now) for task in self.open.values())
        return (self.num_done + num_under_way) / self.share

    def is_there(self, now: float) -> bool:
        asks = now - self.asked_at <= ASKING_S
        return asks or any(task.num_running for task in self.open.values())


class MixQuotas:
    """Of one run of the engine."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._mixes: dict[str, _Mix] = {}
        self._of_task: dict[str, _Mix] = {}
        """Whose an open task is: of the mix that began it."""
        self._waiting: dict[str, _Mix] = {}
        """By group: whose count a completed task is in, until a step takes it."""

    def __len__(self) -> int:
        return len(self._mixes)

    def may_begin(self, name: str, share: float, lead: float, task_id: str, now: float) -> bool:
        """Whether an episode of this task may be claimed. `lead` is how far ahead of its share a
        mix may run, in batches. More episodes of a task that has begun always may."""
        mix = self._joined(name, share, now)
        if task_id in self._of_task:
            return True
        there = [other for other in self._mixes.values() if other.is_there(now)]
        if there == [mix]:
            return True
        tasks_per_share = self._batch_size / sum(other.share for other in there)
        self._carry_along(there, tasks_per_share)
        ahead = (mix.begun_pace(now) - min(other.pace for other in there)) * mix.share
        return ahead < max(1.0, lead * tasks_per_share * mix.share)

    def claimed(self, name: str, task_id: str, now: float) -> None:
        """An episode of the task is being played."""
        task = self._opened(self._mixes[name], task_id, now)
        task.num_running += 1
        task.seen_at = now

    def ended(self, claimed_for: str, task_id: str, now: float) -> None:
        """`task_id`: what it was handed in for."""
        mix = self._of_task.get(claimed_for)
        if mix is not None:
            self._opened(mix, task_id, now).num_ended += 1
            self.gave_up(claimed_for, now)

    def gave_up(self, task_id: str, now: float) -> None:
        """An episode is not being played any more. A task that has nothing else is as if it had
        not begun."""
        mix = self._of_task.get(task_id)
        if mix is None:
            return
        task = mix.open[task_id]
        task.num_running = max(0, task.num_running - 1)
        task.seen_at = now
        mix.num_vain += self._close_if_empty(task_id)

    def completed(self, task_id: str, group_id: str, *, is_pooled: bool) -> None:
        """All its episodes are there; those still being played are of the next one. One that is
        not pooled counts to no share: another may take its place."""
        mix = self._of_task.get(task_id)
        if mix is None:
            return
        mix.open[task_id].num_ended = 0
        self._close_if_empty(task_id)
        mix.num_vain = 0 if is_pooled else mix.num_vain + 1
        if is_pooled:
            mix.num_done += 1
            self._waiting[group_id] = mix

    def taken(self, group_id: str) -> None:
        """By a step."""
        self._waiting.pop(group_id, None)

    def dropped(self, group_id: str) -> None:
        """It was pooled, and no step will take it."""
        mix = self._waiting.pop(group_id, None)
        if mix is not None:
            mix.num_done -= 1

    def sweep(self, now: float) -> None:
        """Forgets those that have gone. To be called now and again."""
        gone = [name for name, mix in self._mixes.items() if not mix.open and not mix.is_there(now)]
        for name in gone:
            del self._mixes[name]

    def _joined(self, name: str, share: float, now: float) -> _Mix:
        mix = self._mixes.setdefault(name, _Mix(share))
        mix.num_done *= share / mix.share  # its pace stays: another share holds from here on
        mix.share = share
        if not mix.is_there(now):
            others = [one.pace for one in self._mixes.values() if one.is_there(now)]
            furthest = max(one.pace for one in self._mixes.values())
            mix.num_done = max(mix.num_done, min(others, default=furthest) * share)
        mix.asked_at = now
        return mix

    def _carry_along(self, there: Sequence[_Mix], tasks_per_share: float) -> None:
        """Those that give nothing come to where the slowest of the others is."""
        vain = [mix for mix in there if mix.gives_nothing(tasks_per_share * mix.share)]
        others = [mix.pace for mix in there if mix not in vain]
        pace = min(others, default=max(mix.pace for mix in there))
        for mix in vain:
            mix.num_done = max(mix.num_done, pace * mix.share)

    def _opened(self, mix: _Mix, task_id: str, now: float) -> _OpenTask:
        mix = self._of_task.setdefault(task_id, mix)
        return mix.open.setdefault(task_id, _OpenTask(now))

    def _close_if_empty(self, task_id: str) -> bool:
        mix = self._of_task[task_id]
        task = mix.open[task_id]
        is_empty = not task.num_running and not task.num_ended
        if is_empty:
            del mix.open[task_id], self._of_task[task_id]
        return is_empty
