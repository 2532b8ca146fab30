"""Episodes of active clients that wait for the others of their task. Pure; the clock is passed
in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.episodes.group_policy import FULL
from fakevllm_server.types.calls import FinishedGroup, ScoredEpisode, total_tokens

MAX_TASKS = 10_000
MAX_TOKENS = 20_000_000
"""Of all that wait; beyond either the task goes that has waited longest for its next episode."""


@dataclass(slots=True)
class _Task:
    episodes: list[ScoredEpisode] = field(default_factory=list[ScoredEpisode])
    since: float | None = None
    """When its last episode was seen to be there; None until somebody looks."""


@dataclass(frozen=True, slots=True)
class ExpiredTask:
    """One whose other episodes are not waited for."""

    task_id: str
    episodes: Sequence[ScoredEpisode]
    is_for_room: bool

    def why_not_pooled(self, job: TrainJob) -> str | None:
        if self.is_for_room:
            return FULL
        return "partial" if job.partial_tasks == "drop" else None


@dataclass(frozen=True, slots=True)
class CompletedTask:
    """A task that has all the episodes it will have."""

    group: FinishedGroup
    reason: str | None
    """Why it is not pooled; None where it is."""


class WaitingTasks:
    def __init__(self, num_repeat: int) -> None:
        self._num_repeat = num_repeat
        self._tasks: OrderedDict[str, _Task] = OrderedDict()  # by their last episode
        self.num_tokens = self.num_episodes = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[tuple[str, Sequence[ScoredEpisode]]]:
        return ((task_id, task.episodes) for task_id, task in self._tasks.items())

    def add(
        self, task_id: str, episode: Callable[[int], ScoredEpisode]
    ) -> list[ScoredEpisode] | None:
        """All episodes of the task, where they are complete with this one, made with its place
        among them. Its time begins anew with the next look."""
        task = self._tasks.setdefault(task_id, _Task())
        self._tasks.move_to_end(task_id)
        task.episodes.append(episode(len(task.episodes)))
        task.since = None
        self.num_tokens += total_tokens(task.episodes[-1:])
        self.num_episodes += 1
        return self._pop(task_id) if len(task.episodes) >= self._num_repeat else None

    def take_all(self) -> list[ExpiredTask]:
        """Nothing is waited for any more."""
        return [ExpiredTask(task_id, self._pop(task_id), False) for task_id in list(self._tasks)]

    def take_left(self, now: float, after_s: float) -> list[ExpiredTask]:
        """Those that have waited `after_s` for their next episode, or that there is no room for;
        they wait no more."""
        for task in reversed(self._tasks.values()):
            if task.since is not None:
                break
            task.since = now
        left: list[ExpiredTask] = []
        while self._tasks:
            task_id, oldest = next(iter(self._tasks.items()))
            is_for_room = len(self._tasks) > MAX_TASKS or self.num_tokens > MAX_TOKENS
            if not is_for_room and oldest.since is not None and now - oldest.since <= after_s:
                break
            left.append(ExpiredTask(task_id, self._pop(task_id), is_for_room))
        return left

    def _pop(self, task_id: str) -> list[ScoredEpisode]:
        episodes = self._tasks.pop(task_id).episodes
        self.num_tokens -= total_tokens(episodes)
        self.num_episodes -= len(episodes)
        return episodes
