"""Shares of several kinds of tasks in what is trained, held to by when their tasks may begin. Pure;
the clock is passed in.

Weighted fair queueing over tasks: a mix may begin another one while those it has completed and has
under way, over its share, are not too far ahead of what the slowest has completed over its own.
Only mixes that ask, or have episodes under way, are waited for; one that has been away goes on
where the others are, with nothing to make up for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ASKING_S = 30.0
"""How long after it asked a mix still counts as asking; clients ask every two seconds."""
FORGOTTEN_S = 3600.0
"""A task with no episode under way, and nothing heard of it for so long, will not be completed."""


@dataclass(slots=True)
class _Mix:
    share: float
    num_done: float = 0.0
    asked_at: float = 0.0
    open: dict[str, _OpenTask] = field(default_factory=dict[str, "_OpenTask"])

    @property
    def pace(self) -> float:
        """What it has completed, by its share."""
        return self.num_done / self.share

    @property
    def begun_pace(self) -> float:
        return (self.num_done + len(self.open)) / self.share

    def is_there(self, now: float) -> bool:
        asks = now - self.asked_at <= ASKING_S
        return asks or any(task.num_running for task in self.open.values())


@dataclass(slots=True)
class _OpenTask:
    seen_at: float
    num_running: int = 0


class Mixes:
    """Of one run of the engine."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._mixes: dict[str, _Mix] = {}

    def may_begin(self, name: str, share: float, lead: float, task_id: str, now: float) -> bool:
        """Whether an episode of this task may be claimed. `lead` is how far ahead of its share a
        mix may run, in batches. More episodes of a task that has begun always may."""
        self._sweep(now)
        mix = self._joined(name, share, now)
        if task_id in mix.open:
            return True
        there = [other for other in self._mixes.values() if other.is_there(now)]
        if there == [mix]:
            return True
        ahead = (mix.begun_pace - min(other.pace for other in there)) * mix.share
        its_part = self._batch_size * mix.share / sum(other.share for other in there)
        return ahead < max(1.0, lead * its_part)

    def claimed(self, name: str, task_id: str, now: float) -> None:
        """An episode of the task is under way."""
        task = self._mixes[name].open.setdefault(task_id, _OpenTask(now))
        task.num_running += 1
        task.seen_at = now

    def released(self, name: str, task_id: str, now: float) -> None:
        """It has ended, or was given up."""
        task = self._mixes[name].open.get(task_id) if name in self._mixes else None
        if task is not None:
            task.num_running -= 1
            task.seen_at = now

    def completed(self, name: str, task_id: str, *, is_pooled: bool) -> None:
        """All its episodes are there. One that is not pooled counts to no share: another may take
        its place."""
        mix = self._mixes.get(name)
        if mix is not None and mix.open.pop(task_id, None) is not None:
            mix.num_done += is_pooled

    def _joined(self, name: str, share: float, now: float) -> _Mix:
        mix = self._mixes.get(name)
        if mix is None:
            mix = self._mixes[name] = _Mix(share)
        if not mix.is_there(now) or mix.share != share:
            mix.share = share
            others = [
                one.pace for one in self._mixes.values() if one is not mix and one.is_there(now)
            ]
            if others:
                mix.num_done = max(mix.num_done, min(others) * share)
        mix.asked_at = now
        return mix

    def _sweep(self, now: float) -> None:
        for mix in self._mixes.values():
            gone = [
                task_id
                for task_id, task in mix.open.items()
                if not task.num_running and now - task.seen_at > FORGOTTEN_S
            ]
            for task_id in gone:
                del mix.open[task_id]
