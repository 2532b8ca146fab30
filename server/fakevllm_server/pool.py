"""What has been captured and not yet trained: open groups, finished groups, the next batch. Pure.

Passive groups arrive whole with their rewards; episodes of active clients gather under their task
until there are
`num_repeat` of them. Each id is accepted once: an end that is repeated gets the first answer again,
and where that is forgotten, a refusal.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fakevllm_adapters.swarm import EndGroupReply, SiblingRef
from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.algorithms import NEEDS_GREEDY
from fakevllm_server.algorithms.shaping import is_tied, shaped_rewards
from fakevllm_server.algorithms.staleness import keep_fresh
from fakevllm_server.calls import FinishedGroup, RecordedCall, ScoredEpisode
from fakevllm_server.served import ServedCalls

MAX_OPEN_GROUPS = 10_000
MAX_FINISHED_GROUPS = 10_000
"""Beyond these the oldest is dropped and counted."""
MAX_OPEN_S = 3600.0
"""An open group whose last call is older has lost its client."""
MAX_REPLIES = 2_000
"""Remembered answers to ends, for clients that repeat them."""
MAX_GROUP_SIZE = 256
TIED = "tied"
"""Why a group is not pooled whose rewards are all equal, where those do not count."""


@dataclass(slots=True)
class OpenGroup:
    """Captured calls of siblings that have no reward yet."""

    calls: defaultdict[int, list[RecordedCall]] = field(
        default_factory=lambda: defaultdict[int, list[RecordedCall]](list)
    )
    last_call: float = 0.0


@dataclass(frozen=True, slots=True)
class Taken:
    """The groups of one step, and those that came too late for any."""

    groups: list[FinishedGroup]
    dropped: dict[str, str]
    """Group id to reason."""


class Pool:
    def __init__(self, job: TrainJob | None = None) -> None:
        self._job = job = job or TrainJob()
        self._num_repeat = job.num_repeat
        self._needs_greedy = job.algorithm in NEEDS_GREEDY
        self._open: OrderedDict[str, OpenGroup] = OrderedDict()  # by their last call
        self._finished: OrderedDict[str, FinishedGroup] = OrderedDict()
        self._by_task: OrderedDict[str, list[ScoredEpisode]] = OrderedDict()
        self._replies: OrderedDict[str, EndGroupReply] = OrderedDict()
        self._refused: dict[str, str] = {}
        """Ids that may not come again, with the reason: every id that ended is one."""
        self._completions: Counter[str] = Counter()
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

    def refuse(self, group_ids: dict[str, str]) -> None:
        """From now on; each id with the reason."""
        self._refused |= group_ids

    def add_call(self, sibling: SiblingRef, call: RecordedCall, now: float) -> None:
        """Calls of a group that has ended, or whose id is refused, are ignored."""
        if sibling.group_id in self._refused:
            return
        if sibling.index >= MAX_GROUP_SIZE:
            return
        group = self._open.setdefault(sibling.group_id, OpenGroup())
        group.calls[sibling.index].append(call)
        group.last_call = now
        self._open.move_to_end(sibling.group_id)
        if len(self._open) > MAX_OPEN_GROUPS:
            self._drop_oldest_open()

    def sweep(self, now: float) -> None:
        """Drops open groups whose end will not come."""
        while self._open and now - next(iter(self._open.values())).last_call > MAX_OPEN_S:
            self._drop_oldest_open()

    def has_ended(self, group_id: str) -> bool:
        return group_id in self._replies

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
        if group_id in self._replies:
            return self._replies[group_id]
        if group_id in self._refused:
            return EndGroupReply(success=False, failure_reason=self._refused[group_id])
        opened = self._open.pop(group_id, None)
        if opened is None:
            return EndGroupReply(success=False, failure_reason="unknown_group")
        episodes = [
            ScoredEpisode(i, reward, opened.calls.get(i, [])) for i, reward in enumerate(rewards)
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
        self._remember(group_id, reply)
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
        if sample_id in self._replies:
            return self._replies[sample_id]
        if sample_id in self._refused:
            return EndGroupReply(success=False, failure_reason=self._refused[sample_id])
        episode = ScoredEpisode(0, advantage, tuple(calls))
        sample = FinishedGroup(sample_id, [episode], advantage=advantage)
        reason = closed or self._keep(sample)
        reply = EndGroupReply(
            success=True, failure_reason=reason or "", pooled=reason is None, step=step
        )
        self._remember(sample_id, reply)
        return reply

    def abort_group(self, group_id: str) -> None:
        self._open.pop(group_id, None)
        if group_id not in self._replies:
            self._remember(group_id, EndGroupReply(success=False, failure_reason="aborted"))

    def add_episode(
        self, task_id: str, reward: float, calls: Sequence[RecordedCall], *, trains: bool = True
    ) -> str | None:
        """An active client's episode. Its task is complete with `num_repeat` of them; more join
        the next one. Returns the id of the group that is pooled with it."""
        if not trains:
            return None
        episodes = self._by_task.setdefault(task_id, [])
        # A copy: a call that is still running when its episode ends comes too late.
        episodes.append(ScoredEpisode(len(episodes), reward, tuple(calls)))
        if len(episodes) < self._num_repeat:
            return None
        del self._by_task[task_id]
        group = FinishedGroup(self._completion_id(task_id), episodes)
        reason = self._keep(group)
        self._refused[group.group_id] = reason or "already_ended"
        if reason is not None:
            self.dropped[group.group_id] = reason
            return None
        return group.group_id

    def take(self, version: int) -> Taken:
        """The newest groups of a step, in the order they came: where more arrives than can be
        trained, the freshest is the closest to the policy. Calls too many versions back are
        dropped, and groups of which too little is left. There are none where that leaves too few
        for a step."""
        dropped = self.take_dropped() | self._drop_stale(version)
        if not self.is_due:
            return Taken([], dropped)
        newest = list(self._finished)[-self._job.batch_size :]
        return Taken([self._finished.pop(group_id) for group_id in newest], dropped)

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
        return dropped

    def put_back(self, groups: Sequence[FinishedGroup]) -> None:
        """Groups taken for a step that did not come about."""
        for group in groups:
            self._finished[group.group_id] = group

    def _completion_id(self, task_id: str) -> str:
        """Unlike any before it, those of earlier starts of the server included."""
        while True:
            self._completions[task_id] += 1
            group_id = f"task:{task_id}#{self._completions[task_id]}"
            if group_id not in self._refused:
                return group_id

    def _drop_oldest_open(self) -> None:
        group_id, _ = self._open.popitem(last=False)
        self._refused[group_id] = self.dropped[group_id] = "never_ended"

    def _keep(self, group: FinishedGroup) -> str | None:
        """Pools it, or says why not."""
        reason = self._why_not_pooled(group)
        if reason == TIED:
            self._left_out["tied_groups"] += 1
        if reason is None:
            self._finished[group.group_id] = group
        if len(self._finished) > MAX_FINISHED_GROUPS:
            self.dropped[self._finished.popitem(last=False)[0]] = "pool_full"
        return reason

    def _drop_stale(self, version: int) -> dict[str, str]:
        """From all that waits; group id to reason, of the groups that go."""
        dropped: dict[str, str] = {}
        for group in list(self._finished.values()):
            fresh, num_stale = keep_fresh(group, version, self._job.max_staleness)
            self._left_out["stale_calls"] += num_stale
            if num_stale and self._why_not_pooled(fresh) is not None:
                del self._finished[group.group_id]
                dropped[group.group_id] = "stale"
            elif num_stale:
                self._finished[group.group_id] = fresh
        return dropped

    def _remember(self, group_id: str, reply: EndGroupReply) -> None:
        self._refused[group_id] = reply.failure_reason or "already_ended"
        self._replies[group_id] = reply
        if len(self._replies) > MAX_REPLIES:
            self._replies.popitem(last=False)

    def _why_not_pooled(self, group: FinishedGroup) -> str | None:
        reason = _why_untrainable(group)
        if group.is_sample:
            return reason
        if reason is None and self._needs_greedy and not any(one.is_greedy for one in group.scored):
            reason = "no_greedy_answer"
        if reason is None and self._job.filter_groups and is_tied(shaped_rewards(group, self._job)):
            reason = TIED
        return reason


def _why_untrainable(group: FinishedGroup) -> str | None:
    if len(group.rewards) < 2 and not group.is_sample:
        return "fewer_than_two_rewards"
    if not any(episode.trains for episode in group.episodes):
        reasons = {call.untrainable for e in group.episodes for call in e.calls if call.untrainable}
        return "no_trainable_call" + (f": {'; '.join(sorted(reasons))}" if reasons else "")
    return None
