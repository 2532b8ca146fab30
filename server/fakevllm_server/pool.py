"""What has been captured and not yet trained: open groups, finished groups, the next batch. Pure.

Passive groups arrive whole with their rewards; episodes of active clients gather under their task
until there are
`num_repeat` of them. Each id is accepted once; a repeated end is answered before it comes here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fakevllm_adapters.swarm import MAX_GROUP_SIZE, EndGroupReply, SiblingRef
from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.algorithms.staleness import keep_fresh
from fakevllm_server.calls import FinishedGroup, RecordedCall, ScoredEpisode
from fakevllm_server.group_policy import TIED, why_not_pooled
from fakevllm_server.open_groups import OpenGroups
from fakevllm_server.served import ServedCalls

MAX_FINISHED_GROUPS = 10_000
MAX_TOKENS = 20_000_000
"""Of all groups that wait; beyond either the oldest is dropped and counted."""
MAX_REMEMBERED = 20_000
"""Ids that have ended, remembered here; older ones are looked up."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The groups of one step, and those that came too late for any."""

    groups: list[FinishedGroup]
    dropped: dict[str, str]
    """Group id to reason."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A task that has all its episodes."""

    group: FinishedGroup
    reason: str | None
    """Why it is not pooled; None where it is."""


class Pool:
    def __init__(
        self,
        job: TrainJob | None = None,
        why_ended: Callable[[str], str | None] = lambda group_id: None,
    ) -> None:
        """`why_ended` knows the ids of earlier lives, and why each may not come again."""
        self._job = job = job or TrainJob()
        self._why_ended = why_ended
        self._num_repeat = job.num_repeat
        self._open = OpenGroups()
        self._finished: OrderedDict[str, FinishedGroup] = OrderedDict()
        self._num_tokens = 0
        self._by_task: OrderedDict[str, list[ScoredEpisode]] = OrderedDict()
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Ids that may not come again, with the reason: every id that ended is one."""
        self.dropped: dict[str, str] = {}
        """Since the last look."""
        self._left_out: Counter[str] = Counter()
        self._served = ServedCalls()

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    @property
    def is_due(self) -> bool:
        """Whether there are groups enough for a step. Where ties do not count, a step is made of
        fewer rather than never."""
        batch_size = self._job.batch_size
        num_seen = self.num_finished + self._left_out["tied_groups"]
        waited_long = num_seen >= self._job.max_num_gen_batches * batch_size
        is_short = self._job.filter_groups and waited_long and self.num_finished > 0
        return self.num_finished >= batch_size or is_short

    @property
    def num_open(self) -> int:
        return len(self._open)

    def refusal_of(self, group_id: str) -> str | None:
        """Why the id may not come again; None where it may."""
        return self._ended.get(group_id) or self._why_ended(group_id)

    def add_call(self, sibling: SiblingRef, call: RecordedCall, now: float) -> int | None:
        """Its place among the sibling's calls. None for one that is ignored: of a group that has
        ended, or whose id is refused."""
        is_open = sibling.group_id in self._open
        if sibling.index >= MAX_GROUP_SIZE or not (is_open or self._is_new(sibling.group_id)):
            return None
        place = self._open.add(sibling, call, now)
        self.sweep(now)
        return place

    def sweep(self, now: float) -> None:
        """Drops open groups whose end will not come."""
        for group_id in self._open.take_left(now):
            self.dropped[group_id] = "never_ended"
            self._remember(group_id, "never_ended")

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
            refusal = self.refusal_of(group_id) or "unknown_group"
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
        self._remember(group_id, reason)
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
        refusal = "open_group" if sample_id in self._open else self.refusal_of(sample_id)
        if refusal is not None:
            return EndGroupReply(success=False, failure_reason=refusal)
        episode = ScoredEpisode(0, advantage, tuple(calls), SiblingRef(sample_id, 0).episode_id)
        sample = FinishedGroup(sample_id, [episode], advantage=advantage)
        reason = closed or self._keep(sample)
        reply = EndGroupReply(
            success=True, failure_reason=reason or "", pooled=reason is None, step=step
        )
        self._remember(sample_id, reason)
        return reply

    def abort_group(self, group_id: str) -> bool:
        """Whether that changes anything."""
        self._open.pop(group_id)
        if not self._is_new(group_id):
            return False
        self._remember(group_id, "aborted")
        return True

    def add_episode(
        self, task_id: str, reward: float, calls: Sequence[RecordedCall], owner: str
    ) -> Completed | None:
        """An active client's episode. Its task is complete with `num_repeat` of them; more join
        the next one."""
        episodes = self._by_task.setdefault(task_id, [])
        # A copy: a call that is still running when its episode ends comes too late.
        episodes.append(ScoredEpisode(len(episodes), reward, tuple(calls), owner))
        if len(episodes) < self._num_repeat:
            return None
        del self._by_task[task_id]
        # The owner's name is in it, for the task may come again, in this life or in another.
        group = FinishedGroup(f"task:{task_id}#{owner}", episodes)
        reason = self._keep(group)
        self._remember(group.group_id, reason)
        if reason is not None:
            self.dropped[group.group_id] = reason
        return Completed(group, reason)

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

    def take(self, version: int) -> Taken:
        """The newest groups of a step, in the order they came: where more arrives than can be
        trained, the freshest is the closest to the policy. Calls too many versions back are
        dropped, and groups of which too little is left. There are none where that leaves too few
        for a step."""
        dropped = self.take_dropped() | self._drop_stale(version)
        if not self.is_due:
            return Taken([], dropped)
        newest = list(self._finished)[-self._job.batch_size :]
        return Taken([self._remove(group_id) for group_id in newest], dropped)

    def take_left_out(self) -> dict[str, int]:
        """How many calls were too old and, where ties do not count, how many groups were tied,
        since the last look."""
        left_out = {"stale_calls": 0} | dict(self._left_out)
        self._left_out.clear()
        return left_out

    def take_dropped(self) -> dict[str, str]:
        """Group id to reason, of those dropped since the last look."""
        dropped, self.dropped = self.dropped, {}
        return dropped

    def give_up(self, reason: str) -> dict[str, str]:
        """All finished groups are dropped; group id to reason."""
        dropped = dict.fromkeys(self._finished, reason)
        self._finished.clear()
        self._num_tokens = 0
        return dropped

    def _is_new(self, group_id: str) -> bool:
        return self.refusal_of(group_id) is None

    def _keep(self, group: FinishedGroup) -> str | None:
        """Pools it, or says why not."""
        reason = why_not_pooled(group, self._job)
        if reason == TIED:
            self._left_out["tied_groups"] += 1
        if reason is None:
            self._finished[group.group_id] = group
            self._num_tokens += group.num_tokens
            self._make_room()
        return reason

    def _make_room(self) -> None:
        while len(self._finished) > MAX_FINISHED_GROUPS or self._num_tokens > MAX_TOKENS:
            self.dropped[self._remove(next(iter(self._finished))).group_id] = "pool_full"

    def _remove(self, group_id: str) -> FinishedGroup:
        group = self._finished.pop(group_id)
        self._num_tokens -= group.num_tokens
        return group

    def _drop_stale(self, version: int) -> dict[str, str]:
        """From all that waits; group id to reason, of the groups that go."""
        dropped: dict[str, str] = {}
        for group in list(self._finished.values()):
            fresh, num_stale = keep_fresh(group, version, self._job.max_staleness)
            self._left_out["stale_calls"] += num_stale
            if num_stale and why_not_pooled(fresh, self._job) is not None:
                self._remove(group.group_id)
                dropped[group.group_id] = "stale"
            elif num_stale:
                self._num_tokens += fresh.num_tokens - group.num_tokens
                self._finished[group.group_id] = fresh
        return dropped

    def _remember(self, group_id: str, reason: str | None) -> None:
        self._ended[group_id] = reason or "already_ended"
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
