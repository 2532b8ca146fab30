"""Tasks that have fewer than `num_repeat` ended episodes, and wait for more. This module does no
I/O, and gets the current time as an argument."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.episodes.group_filter import FULL
from fakevllm_server.types.calls import FinishedGroup, ScoredEpisode, total_tokens
from fakevllm_server.types.drop_reasons import DropReason

MAX_TASKS = 10_000
MAX_TOKENS = 20_000_000
"""Maximum number of tokens in all waiting tasks. If there are more tokens, or more tasks than
MAX_TASKS, the task that has waited longest for its next episode is removed."""


@dataclass(slots=True)
class _Task:
    episodes: list[ScoredEpisode] = field(default_factory=list[ScoredEpisode])
    since: float | None = None
    """Time of the first call of `pop_expired` after the task's last episode; None before that
    call."""


@dataclass(frozen=True, slots=True)
class ExpiredTask:
    """A task that was removed from the waiting tasks before it had all its episodes."""

    task_id: str
    episodes: Sequence[ScoredEpisode]
    was_full: bool
    """Whether the task was removed because the pool was full."""

    def why_not_pooled(self, job: TrainJob) -> str | None:
        """Return the reason why the episodes of this task cannot be pooled (kept for training) as a
        group. Return None if they can be pooled."""
        if self.was_full:
            return FULL
        return DropReason.PARTIAL.value if job.partial_tasks == "drop" else None


@dataclass(frozen=True, slots=True)
class CompletedTask:
    """The group of a task for which no more episodes are expected. The group may have fewer than
    `num_repeat` episodes."""

    group: FinishedGroup
    reason: str | None
    """Reason why the group is not pooled, or None if the group is pooled."""


class WaitingTasks:
    """The tasks that have fewer than `num_repeat` episodes, and wait for more."""

    def __init__(self, num_repeat: int) -> None:
        self._num_repeat = num_repeat
        self._tasks: OrderedDict[str, _Task] = OrderedDict()  # ordered by their last episode
        self.num_tokens = self.num_episodes = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[tuple[str, Sequence[ScoredEpisode]]]:
        return ((task_id, task.episodes) for task_id, task in self._tasks.items())

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._tasks

    def num_recent_episodes(self, now: float, within_s: float) -> int:
        """Return the number of episodes of the tasks that wait for at most `within_s` seconds for
        their next episode."""
        return sum(
            len(task.episodes)
            for task in self._tasks.values()
            if task.since is None or now - task.since <= within_s
        )

    def add(
        self, task_id: str, new_episode: Callable[[int], ScoredEpisode]
    ) -> list[ScoredEpisode] | None:
        """Add an episode to a task. Return all episodes of the task if the task is now complete,
        else None.

        `new_episode` creates the episode from its index in the task. Each new episode starts the
        waiting time of its task again. The waiting time is counted from the next call of
        `pop_expired`, because this method does not know the time.
        """
        task = self._tasks.setdefault(task_id, _Task())
        self._tasks.move_to_end(task_id)
        task.episodes.append(new_episode(len(task.episodes)))
        task.since = None
        self.num_tokens += total_tokens(task.episodes[-1:])
        self.num_episodes += 1
        return self._pop(task_id) if len(task.episodes) >= self._num_repeat else None

    def pop_all(self) -> list[ExpiredTask]:
        """Remove all waiting tasks, and return them with their episodes."""
        return [ExpiredTask(task_id, self._pop(task_id), False) for task_id in list(self._tasks)]

    def pop_expired(self, now: float, after_s: float) -> list[ExpiredTask]:
        """Remove and return the tasks that waited longer than `after_s` seconds for their next
        episode.

        If there are more tasks or tokens than allowed, also remove and return the tasks that waited
        longest.
        """
        for task in reversed(self._tasks.values()):
            if task.since is not None:
                break
            task.since = now
        expired: list[ExpiredTask] = []
        while self._tasks:
            task_id, oldest = next(iter(self._tasks.items()))
            is_full = len(self._tasks) > MAX_TASKS or self.num_tokens > MAX_TOKENS
            if not is_full and oldest.since is not None and now - oldest.since <= after_s:
                break
            expired.append(ExpiredTask(task_id, self._pop(task_id), is_full))
        return expired

    def _pop(self, task_id: str) -> list[ScoredEpisode]:
        episodes = self._tasks.pop(task_id).episodes
        self.num_tokens -= total_tokens(episodes)
        self.num_episodes -= len(episodes)
        return episodes
