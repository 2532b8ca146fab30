"""What has been captured and not yet trained: open groups, finished groups, the next batch. Pure.

Passive groups arrive whole with their rewards; episodes of active clients gather under their task
until there are `num_repeat` of them, or no more come. Each id is accepted once; a repeated end is
answered before it comes here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import MAX_GROUP_SIZE, EndGroupReply, SiblingRef
from fakevllm_server.episodes.clients import ActiveClients
from fakevllm_server.episodes.finished_groups import EndedGroupIds, FinishedGroups
from fakevllm_server.episodes.group_policy import FULL, TIED, PoolCounts, method_of, why_not_pooled
from fakevllm_server.episodes.open_groups import OpenGroups
from fakevllm_server.episodes.quotas import MixQuotas
from fakevllm_server.episodes.served_calls import ServedCalls
from fakevllm_server.episodes.waiting_tasks import CompletedTask, ExpiredTask, WaitingTasks
from fakevllm_server.types.calls import TASK, FinishedGroup, RecordedCall, ScoredEpisode


@dataclass(frozen=True, slots=True)
class TakenGroups:
    """The groups of one step, and those that came too late for any."""

    groups: list[FinishedGroup]
    dropped: dict[str, str]
    """Group id to reason."""


class Pool:
    def __init__(
        self,
        job: TrainJob | None = None,
        why_ended: Callable[[str], str | None] = lambda group_id: None,
    ) -> None:
        """`why_ended` knows the ids of earlier lives, and why each may not come again."""
        self._job = job = job or TrainJob()
        self._open = OpenGroups()
        self._finished = FinishedGroups()
        self._tasks = WaitingTasks(job.num_repeat)
        self._method = method_of(job)
        self.clients = ActiveClients()
        self.mixes = MixQuotas(job.batch_size)
        self._ended = EndedGroupIds(why_ended)
        self.dropped: dict[str, str] = {}
        """Since the last look."""
        self._left_out: Counter[str] = Counter()
        self._tied: list[int] = []
        """Episodes of each tied group that was dropped since the last step was taken."""
        self._served = ServedCalls()

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    @property
    def is_due(self) -> bool:
        """Whether there is enough for a step, by the job's way of collecting."""
        return self._method.is_due(self.collected, self._job)

    @property
    def collected(self) -> PoolCounts:
        return PoolCounts(
            self.num_finished,
            len(self._tied),
            self._finished.num_episodes + self._tasks.num_episodes + sum(self._tied),
            self.clients.any_agreed,
            self.clients.all_agreed,
        )

    @property
    def finished(self) -> Iterator[FinishedGroup]:
        return iter(self._finished)

    @property
    def partial(self) -> Iterator[tuple[str, Sequence[ScoredEpisode]]]:
        """Task id and episodes, of tasks that lack some."""
        return iter(self._tasks)

    @property
    def batch_size(self) -> int:
        return self._job.batch_size

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> dict[str, int]:
        """What is held here, and how many tokens that is."""
        finished, opened, tasks = self._finished, self._open, self._tasks
        return {
            "finished_groups": len(finished),
            "open_groups": len(opened),
            "partial_tasks": len(tasks),
            "tokens": finished.num_tokens + opened.num_tokens + tasks.num_tokens,
        }

    def add_call(self, sibling: SiblingRef, call: RecordedCall, now: float) -> int | None:
        """Its place among the sibling's calls. None for one that is ignored: of a group that has
        ended, or whose id is refused."""
        is_open = sibling.group_id in self._open
        if sibling.index >= MAX_GROUP_SIZE or not (is_open or self._ended.is_new(sibling.group_id)):
            return None
        place = self._open.add(sibling, call, now)
        self.sweep(now)
        return place

    def sweep(self, now: float) -> None:
        """Drops open groups whose end will not come."""
        for group_id, reason in self._open.take_left(now).items():
            self.dropped[group_id] = reason
            self._ended.remember(group_id, reason)

    def end_group(
        self,
        group_id: str,
        rewards: Sequence[float | None],
        step: int,
        *,
        closed: str | None = None,
        served: int | None = None,
        parent_id: str | None = None,
    ) -> EndGroupReply:
        """The reply to the end of a group; it is pooled where it can be compared and the run is not
        `closed`, for this reason."""
        opened = self._open.pop(group_id)
        if opened is None:
            refusal = self._ended.refusal_of(group_id) or "unknown_group"
            return EndGroupReply(success=False, failure_reason=refusal)
        episodes = [
            ScoredEpisode(i, reward, opened.calls.get(i, []), SiblingRef(group_id, i).episode_id)
            for i, reward in enumerate(rewards)
        ]
        follows = self._served.of(parent_id)
        if served is not None:
            self._served.remember(group_id, opened.calls.get(served, []))
        group = FinishedGroup(group_id, episodes, follows)
        reason = closed or self._keep(group)
        reply = EndGroupReply(
            success=True,
            failure_reason=reason or "",
            pooled=reason is None,
            step=step,
            calls=[[call.to_wire() for call in episode.calls] for episode in episodes],
        )
        self._ended.remember(group_id, reason)
        return reply

    def add_sample(
        self,
        sample_id: str,
        calls: Sequence[RecordedCall],
        advantage: float,
        step: int,
        *,
        closed: str | None = None,
    ) -> EndGroupReply:
        """An answer of an earlier group once more, with an advantage of its own; counts as a group
        of a step."""
        refusal = "open_group" if sample_id in self._open else self._ended.refusal_of(sample_id)
        if refusal is not None:
            return EndGroupReply(success=False, failure_reason=refusal)
        episode = ScoredEpisode(0, advantage, tuple(calls), SiblingRef(sample_id, 0).episode_id)
        sample = FinishedGroup(sample_id, [episode], advantage=advantage)
        reason = closed or self._keep(sample)
        self._ended.remember(sample_id, reason)
        return EndGroupReply(
            success=True, failure_reason=reason or "", pooled=reason is None, step=step
        )

    def abort_group(self, group_id: str) -> bool:
        """Whether that changes anything."""
        self._open.pop(group_id)
        if not self._ended.is_new(group_id):
            return False
        self._ended.remember(group_id, "aborted")
        return True

    def add_episode(
        self, task_id: str, reward: float, calls: Sequence[RecordedCall], owner: str
    ) -> CompletedTask | None:
        """An active client's episode. Its task is complete with `num_repeat` of them; more join
        the next one."""
        # A copy: a call that is still running when its episode ends comes too late.
        copied = tuple(calls)
        episodes = self._tasks.add(
            task_id, lambda index: ScoredEpisode(index, reward, copied, owner)
        )
        return None if episodes is None else self._completed(task_id, episodes)

    def complete_left(self, now: float) -> list[CompletedTask]:
        """Tasks whose other episodes are not waited for any longer. To be asked again and again."""
        left = self._tasks.take_left(now, self._job.partial_after_s)
        return [self._over(one) for one in left]

    def complete_all(self) -> list[CompletedTask]:
        """The same of all tasks, where a step takes what there is."""
        left = self._tasks.take_all() if self._method.takes_all else []
        return [self._over(one) for one in left]

    def _over(self, task: ExpiredTask) -> CompletedTask:
        return self._completed(task.task_id, task.episodes, task.why_not_pooled(self._job))

    def _completed(
        self, task_id: str, episodes: Sequence[ScoredEpisode], reason: str | None = None
    ) -> CompletedTask:
        # A claim's name is in it, for the task may come again, in this life or in another.
        group = FinishedGroup(f"{TASK}{task_id}#{episodes[-1].owner}", episodes)
        reason = reason or self._keep(group)
        if reason is None:
            self._count_partial(len(episodes) < self._job.num_repeat)
        self._ended.remember(group.group_id, reason)
        if reason is not None:
            self.dropped[group.group_id] = reason
        is_pooled = group.group_id not in self.dropped
        self.mixes.completed(task_id, group.group_id, is_pooled=is_pooled)
        return CompletedTask(group, reason)

    def restore(
        self,
        groups: Sequence[FinishedGroup],
        open_groups: Mapping[str, Mapping[int, Sequence[RecordedCall]]],
        now: float,
    ) -> dict[str, str]:
        """What an earlier life, or an earlier job, left. Group id to reason, of the groups this
        job does not take."""
        dropped: dict[str, str] = {}
        for group in groups:
            reason = self._keep(group)
            if reason is not None:
                dropped[group.group_id] = reason
        for group_id, calls in open_groups.items():
            self._open.restore(group_id, calls, now)
        return dropped

    def take(self, version: int) -> TakenGroups:
        """The newest groups of a step, in the order they came: where more arrives than can be
        trained, the freshest is the closest to the policy. Calls too many versions back are
        dropped, and groups of which too little is left. There are none where that leaves too few
        for a step. Where the job collects what there is, it is all of them."""
        dropped = self.take_dropped() | self._drop_stale(version)
        takes_all = self._method.takes_all
        if not (takes_all or self.is_due):
            return TakenGroups([], dropped)
        newest = self._finished.newest(self.num_finished if takes_all else self._job.batch_size)
        self._tied.clear()
        self.clients.stepped()
        for group_id in newest:
            self.mixes.taken(group_id)
        return TakenGroups([self._finished.remove(group_id) for group_id in newest], dropped)

    def take_left_out(self) -> dict[str, int]:
        """How many calls were too old, how many groups partial and, where they are dropped, how
        many tied, since the last look."""
        left_out = {"stale_calls": 0} | dict(self._left_out)
        self._left_out.clear()
        return left_out

    def take_dropped(self) -> dict[str, str]:
        """Group id to reason, of those dropped since the last look."""
        dropped, self.dropped = self.dropped, {}
        return dropped

    def give_up(self, reason: str) -> dict[str, str]:
        """All finished groups are dropped; group id to reason."""
        return dict.fromkeys(self._finished.clear(), reason)

    def _keep(self, group: FinishedGroup) -> str | None:
        """Pools it, or says why not."""
        reason = why_not_pooled(group, self._job)
        if reason == TIED:
            self._tied.append(len(group.episodes))
            self._left_out["tied_groups"] += 1
        if reason is None:
            self._count_partial(group.is_partial)
            left_out = self._finished.add(group)
            self.dropped |= dict.fromkeys(left_out, FULL)
            for group_id in left_out:
                self.mixes.dropped(group_id)
        return reason

    def _count_partial(self, is_partial: bool) -> None:
        if is_partial:
            self._left_out["partial_groups"] += 1

    def _drop_stale(self, version: int) -> dict[str, str]:
        """From all that waits; group id to reason, of the groups that go."""
        left_out, num_calls = self._finished.drop_stale(version, self._job)
        self._left_out["stale_calls"] += num_calls
        for group_id in left_out:
            self.mixes.dropped(group_id)
        return dict.fromkeys(left_out, "stale")
