"""The pool of captured groups and episodes that are not trained yet. This module does no I/O.

The pool has open groups, finished groups, and tasks that wait for episodes. The next batch is taken
from the finished groups. A passive group consists of the answers to one request of an app. This
group ends when the proxy sends the rewards of all answers in one request. Episodes that clients
claim are collected by task, until the task has `num_repeat` episodes or no more episodes are
expected. The pool accepts each group id only once. A request that is sent again does not reach the
pool; it gets the reply to the first request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.forgetting import FORGOTTEN
from fakevllm_adapters.protocol.swarm import (
    MAX_GROUP_SIZE,
    AddLoggedGroupReply,
    EndGroupReply,
    SiblingRef,
)
from fakevllm_server.episodes.active_clients import ActiveClients
from fakevllm_server.episodes.batch_selection import PoolCounts, method_of
from fakevllm_server.episodes.ended_group_ids import EndedGroupIds
from fakevllm_server.episodes.finished_groups import FinishedGroups
from fakevllm_server.episodes.group_filter import (
    FULL,
    REJECTED_VERSION,
    TIED,
    UNVERIFIED,
    why_not_pooled,
)
from fakevllm_server.episodes.incomplete_tasks import CompletedTask, ExpiredTask, WaitingTasks
from fakevllm_server.episodes.open_groups import OpenGroups
from fakevllm_server.episodes.quotas import MixQuotas
from fakevllm_server.episodes.served_call_cache import ServedCalls
from fakevllm_server.types.calls import (
    TASK,
    FinishedGroup,
    RecordedCall,
    ScoredEpisode,
    with_prompts_apart,
)
from fakevllm_server.types.drop_reasons import DropReason
from fakevllm_server.types.edit_demonstrations import edit_episodes


@dataclass(frozen=True, slots=True)
class TakenGroups:
    """The groups that a training step took from the pool, and the groups that were dropped since
    the previous step."""

    groups: list[FinishedGroup]
    dropped: dict[str, str]
    """Maps the id of each dropped group to the reason."""


class Pool:
    """All groups, tasks and clients of the batch that is being collected for the next training
    step."""

    def __init__(
        self,
        job: TrainJob | None = None,
        ended_reason: Callable[[str], str | None] = lambda group_id: None,
        rejected: Callable[[], Collection[int]] = frozenset,
        distrusted: Collection[int] = (),
    ) -> None:
        """Create an empty pool for a job.

        `distrusted` has versions of the weights whose groups are not pooled. The caller may add
        versions to this collection. After that, the caller must call `drop_distrusted`.

        `ended_reason` is a function that looks up a group id from before a restart. It returns the
        reason why the id is refused, or None if the id was not used. `rejected` is a function that
        returns the rejected versions of the weights. Groups of these versions are not trained.
        """
        self._rejected = rejected
        self._job = job = job or TrainJob()
        self._open = OpenGroups()
        self._finished = FinishedGroups()
        self._tasks = WaitingTasks(job.num_repeat)
        self._method = method_of(job)
        self.clients = ActiveClients()
        self.quotas = MixQuotas(job.batch_size)
        self._ended = EndedGroupIds(ended_reason)
        self._distrusted = distrusted
        self.dropped: dict[str, str] = {}
        """Maps the id of each group that was dropped since the last `take_dropped` to the
        reason."""
        self._excluded: Counter[str] = Counter()
        """The counts that the next `take_excluded_counts` returns, by metric name."""
        self._tied: list[int] = []
        """Number of episodes of each tied group that was dropped since the last step."""
        self._served = ServedCalls()

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    @property
    def is_due(self) -> bool:
        """Whether the pool has enough groups for a training step, according to the job's
        sample-collection method."""
        return self._method.is_due(self.counts, self._job)

    @property
    def counts(self) -> PoolCounts:
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
        """One pair (task id, episodes) for each task that waits for more episodes. `episodes`
        contains the ended episodes of the task."""
        return iter(self._tasks)

    @property
    def batch_size(self) -> int:
        return self._job.batch_size

    @property
    def num_open(self) -> int:
        return len(self._open)

    def is_begun(self, task_id: str) -> bool:
        """Return True if the task has ended episodes and waits for more episodes."""
        return task_id in self._tasks

    def num_begun_episodes(self, now: float, within_s: float) -> int:
        """Return the number of ended episodes whose tasks wait for more episodes. Tasks without an
        end of an episode in the last `within_s` seconds are not counted."""
        return self._tasks.num_recent_episodes(now, within_s)

    @property
    def known_groups(self) -> list[str]:
        """Ids of the ended groups that are in memory, followed by the ids of the open groups."""
        return [*self._ended, *self._open]

    @property
    def waiting(self) -> dict[str, int]:
        """Numbers of groups, tasks and tokens in the pool."""
        finished, opened, tasks = self._finished, self._open, self._tasks
        return {
            "finished_groups": len(finished),
            "open_groups": len(opened),
            "partial_tasks": len(tasks),
            "tokens": finished.num_tokens + opened.num_tokens + tasks.num_tokens,
        }

    def add_call(self, sibling: SiblingRef, call: RecordedCall, now: float) -> int | None:
        """Add a captured model call of a sibling to the sibling's open group. Return the index of
        the call among the calls of this sibling.

        If the group has ended, or if the index of the sibling is too large, ignore the call and
        return None.
        """
        is_open = sibling.group_id in self._open
        if sibling.index >= MAX_GROUP_SIZE or not (is_open or self._ended.is_new(sibling.group_id)):
            return None
        index = self._open.add(sibling, call, now)
        self.sweep(now)
        return index

    def with_shared_prompt(self, group_id: str, call: RecordedCall) -> RecordedCall:
        """Return the call. If an earlier call of the group has an equal prompt, the returned call
        shares the array of prompt ids with the earlier call."""
        return self._open.with_shared_prompt(group_id, call)

    def sweep(self, now: float) -> None:
        """Drop the open groups whose clients have disappeared. If there are too many open groups,
        also drop the groups that have had no call for the longest time."""
        for group_id, reason in self._open.pop_expired(now).items():
            self.dropped[group_id] = reason
            self._ended.remember(group_id, reason)

    def end_group(
        self,
        group_id: str,
        rewards: Sequence[float | None],
        step: int,
        *,
        closed_reason: str | None = None,
        served: int | None = None,
        parent_id: str | None = None,
        hook_hash: str = "",
    ) -> EndGroupReply:
        """End an open group. Pool the group if its rewards can be compared. A pooled group is kept
        for training.

        `closed_reason` is None while training continues. After the end of training it is the reason
        for the end, and the group is not pooled. `served` is the index of the sibling whose answer
        the app got. `parent_id` is the group id of the previous turn of the conversation.
        `hook_hash` is the digest of the hook files that gave the rewards, or empty.
        """
        opened = self._open.pop(group_id)
        if opened is None:
            refusal = self._ended.refusal_of(group_id) or DropReason.UNKNOWN_GROUP.value
            return EndGroupReply(success=False, failure_reason=refusal)
        episodes = [
            ScoredEpisode(i, reward, opened.calls.get(i, []), SiblingRef(group_id, i).episode_id)
            for i, reward in enumerate(rewards)
        ]
        follows = self._served.find(parent_id)
        if served is not None:
            self._served.remember(group_id, opened.calls.get(served, []))
        group = FinishedGroup(group_id, episodes, follows, hook_hash=hook_hash)
        reason = closed_reason or self._pool_group(group)
        calls, prompts = with_prompts_apart([episode.calls for episode in episodes])
        reply = EndGroupReply(
            success=True,
            failure_reason=reason or "",
            pooled=reason is None,
            step=step,
            calls=calls,
            prompts=prompts,
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
        closed_reason: str | None = None,
    ) -> EndGroupReply:
        """Add a feedback sample (an earlier answer that is trained once more with an advantage of
        its own) to the groups that wait for training.

        The sample counts as one group of a training step.
        """
        refusal = "open_group" if sample_id in self._open else self._ended.refusal_of(sample_id)
        if refusal is not None:
            return EndGroupReply(success=False, failure_reason=refusal)
        episode = ScoredEpisode(0, advantage, tuple(calls), SiblingRef(sample_id, 0).episode_id)
        sample = FinishedGroup(sample_id, [episode], advantage=advantage)
        reason = closed_reason or self._pool_group(sample)
        self._ended.remember(sample_id, reason)
        return EndGroupReply(
            success=True, failure_reason=reason or "", pooled=reason is None, step=step
        )

    def add_demonstrations(
        self,
        sample_id: str,
        loss: str,
        calls: Sequence[RecordedCall],
        step: int,
        *,
        closed_reason: str | None = None,
    ) -> EndGroupReply:
        """Add the demonstrations of a user's edit to the groups that wait for training. `loss` is
        the demonstration loss that trains the demonstrations, and `calls` has one call for each
        demonstration.

        The demonstrations of an edit count as one group of a training step.
        """
        refusal = "open_group" if sample_id in self._open else self._ended.refusal_of(sample_id)
        if refusal is not None:
            return EndGroupReply(success=False, failure_reason=refusal)
        group = FinishedGroup(sample_id, edit_episodes(sample_id, calls), demonstrates=loss)
        reason = closed_reason or self._pool_group(group)
        self._ended.remember(sample_id, reason)
        return EndGroupReply(
            success=True, failure_reason=reason or "", pooled=reason is None, step=step
        )

    def add_logged_group(
        self,
        group_id: str,
        rewards: Sequence[float | None],
        calls: Sequence[Sequence[RecordedCall]],
        step: int,
        *,
        closed_reason: str | None = None,
        hook_hash: str = "",
    ) -> AddLoggedGroupReply:
        """Add a group of an earlier run to the groups that wait for training. `calls` has the calls
        of each sibling. Siblings without calls at the end of the list may be left out."""
        is_open = group_id in self._open
        refusal = "open_group" if is_open else self._ended.refusal_of(group_id)
        if refusal is not None:
            return AddLoggedGroupReply(success=False, failure_reason=refusal)
        episodes = [
            ScoredEpisode(i, reward, tuple(own or ()), SiblingRef(group_id, i).episode_id)
            for i, (reward, own) in enumerate(zip_longest(rewards, calls[: len(rewards)]))
        ]
        group = FinishedGroup(group_id, episodes, hook_hash=hook_hash)
        reason = closed_reason or self._pool_group(group)
        self._ended.remember(group_id, reason)
        return AddLoggedGroupReply(
            success=True,
            failure_reason=reason or "",
            pooled=reason is None,
            step=step,
            is_due=closed_reason is None and self.is_due,
        )

    def abort_group(self, group_id: str) -> bool:
        """Drop an open group. Return False if the group has already ended."""
        self._open.pop(group_id)
        if not self._ended.is_new(group_id):
            return False
        self._ended.remember(group_id, "aborted")
        return True

    def add_episode(
        self, task_id: str, reward: float, calls: Sequence[RecordedCall], owner: str
    ) -> CompletedTask | None:
        """Add an episode that a client has ended to its task. If this completes the task, return
        the task's group, else None.

        A task is complete with `num_repeat` episodes. The next episode of the task begins another
        group.
        """
        # Copy the calls: a call that ends after its episode must not be added.
        copied = tuple(calls)
        episodes = self._tasks.add(
            task_id, lambda index: ScoredEpisode(index, reward, copied, owner)
        )
        return None if episodes is None else self._complete(task_id, episodes)

    def complete_expired(self, now: float) -> list[CompletedTask]:
        """Complete the tasks that waited too long for more episodes. Each task is completed with
        the episodes that it has. Call this method periodically."""
        expired = self._tasks.pop_expired(now, self._job.partial_after_s)
        return [self._complete_expired(task) for task in expired]

    def complete_all(self) -> list[CompletedTask]:
        """If the job allows training steps with incomplete tasks, complete each waiting task with
        the episodes that it has. Otherwise do nothing."""
        expired = self._tasks.pop_all() if self._method.takes_all else []
        return [self._complete_expired(task) for task in expired]

    def _complete_expired(self, task: ExpiredTask) -> CompletedTask:
        return self._complete(task.task_id, task.episodes, task.why_not_pooled(self._job))

    def _complete(
        self, task_id: str, episodes: Sequence[ScoredEpisode], reason: str | None = None
    ) -> CompletedTask:
        # The id contains the uuid of a claim, because the same task may be collected again, also
        # after a restart.
        group = FinishedGroup(f"{TASK}{task_id}#{episodes[-1].owner}", episodes)
        reason = reason or self._pool_group(group)
        if reason is None:
            self._count_partial(len(episodes) < self._job.num_repeat)
        self._ended.remember(group.group_id, reason)
        if reason is not None:
            self.dropped[group.group_id] = reason
        is_pooled = group.group_id not in self.dropped
        self.quotas.completed(task_id, group.group_id, is_pooled=is_pooled)
        return CompletedTask(group, reason)

    def restore(
        self,
        groups: Sequence[FinishedGroup],
        open_groups: Mapping[str, Mapping[int, Sequence[RecordedCall]]],
        now: float,
    ) -> dict[str, str]:
        """Add the groups that the journal (the server's SQLite file) has from an earlier process or
        job.

        A group is not pooled if the settings of the present job exclude it. Return the reasons for
        the groups that are not pooled, by group id.
        """
        dropped: dict[str, str] = {}
        for group in groups:
            reason = self._pool_group(group)
            if reason is not None:
                dropped[group.group_id] = reason
        for group_id, calls in open_groups.items():
            self._open.restore(group_id, calls, now)
        return dropped

    def take(self, version: int) -> TakenGroups:
        """Remove the groups of a training step from the pool, and return them in order of arrival.

        First, drop calls whose weights are too old. Then drop groups that have too few calls left.
        If the job's sample-collection method takes everything, take all remaining groups. With any
        other method, take no group if too few groups remain for a step. Otherwise take the newest
        groups, at most `batch_size`, because the weights that sampled them are closest to the
        current weights. If the job collects batches ahead, take the oldest `batch_size` groups of
        the batch and the batches ahead, because the others can still be trained later.

        `version` is the version of the weights that will be trained.
        """
        dropped = self.take_dropped() | self._drop_stale(version)
        if not (self._method.takes_all or self.is_due):
            return TakenGroups([], dropped)
        num_taken = self._method.num_taken(self.num_finished, self._job)
        num_ahead = self._job.async_steps * self._job.batch_size
        chosen = self._finished.next_batch(num_taken, num_ahead)
        self._tied.clear()
        self.clients.clear()
        for group_id in chosen:
            self.quotas.taken(group_id)
        return TakenGroups([self._finished.remove(group_id) for group_id in chosen], dropped)

    def take_excluded_counts(self) -> dict[str, int]:
        """Return three numbers by metric name, counted since the previous call of this method:
        stale calls (sampled by too old weights), partial groups (with missing rewards), and dropped
        tied groups (whose rewards are all equal)."""
        counts = {"stale_calls": 0} | dict(self._excluded)
        self._excluded.clear()
        return counts

    def take_dropped(self) -> dict[str, str]:
        """Return the groups that were dropped since the previous call of this method. The result
        has the reason for each group id."""
        dropped, self.dropped = self.dropped, {}
        return dropped

    def drop_all(self, reason: str) -> dict[str, str]:
        """Drop all finished groups. Return a dict from the id of each dropped group to `reason`."""
        return dict.fromkeys(self._finished.clear(), reason)

    def forget(self, group_ids: Sequence[str]) -> dict[str, str]:
        """Remove groups and their calls from memory, and refuse requests for these groups from now
        on. Return a dict with the reason for each group that was open or waited to be trained.

        Unknown groups are refused too, because a request for such a group may still be on its way.
        """
        dropped: dict[str, str] = {}
        for group_id in group_ids:
            self._served.forget(group_id)
            is_open = self._open.pop(group_id) is not None
            if group_id in self._finished:
                self._finished.remove(group_id)
                self.quotas.dropped(group_id)
            elif not is_open:
                if self._ended.is_new(group_id):
                    self._ended.remember(group_id, FORGOTTEN)
                continue
            self._ended.remember(group_id, FORGOTTEN)
            dropped[group_id] = FORGOTTEN
        return dropped

    def drop_rejected(self) -> dict[str, str]:
        """Drop the finished groups that were sampled by a rejected version. Return the reason for
        each dropped group id."""
        rejected = self._rejected()
        dropped = [group.group_id for group in self._finished if group.is_sampled_by(rejected)]
        for group_id in dropped:
            self._finished.remove(group_id)
            self.quotas.dropped(group_id)
        return dict.fromkeys(dropped, REJECTED_VERSION)

    def _pool_group(self, group: FinishedGroup) -> str | None:
        """Add an ended group to the groups that wait for training, and return None. If the group
        cannot be trained, return the reason instead."""
        if group.is_sampled_by(self._rejected()):
            return REJECTED_VERSION
        reason = why_not_pooled(group, self._job)
        if group.is_sampled_by(self._distrusted):
            reason = UNVERIFIED
        if reason == TIED:
            self._tied.append(len(group.episodes))
            self._excluded["tied_groups"] += 1
        if reason is None:
            self._count_partial(group.is_partial)
            dropped = self._finished.add(group)
            self.dropped |= dict.fromkeys(dropped, FULL)
            for group_id in dropped:
                self.quotas.dropped(group_id)
        return reason

    def drop_distrusted(self) -> None:
        """Drop the waiting groups that were sampled by a distrusted version. The engine may have
        had other weights under the number of such a version."""
        for group in self._finished:
            if group.is_sampled_by(self._distrusted):
                self._finished.remove(group.group_id)
                self.dropped[group.group_id] = UNVERIFIED
                self.quotas.dropped(group.group_id)

    def _count_partial(self, is_partial: bool) -> None:
        if is_partial:
            self._excluded["partial_groups"] += 1

    def _drop_stale(self, version: int) -> dict[str, str]:
        """Drop the calls that were sampled by weights too old for training. Then drop the groups
        that have too few calls left.

        Return the reason for each dropped group id.
        """
        dropped, num_calls = self._finished.drop_stale(version, self._job)
        self._excluded["stale_calls"] += num_calls
        for group_id in dropped:
            self.quotas.dropped(group_id)
        return dict.fromkeys(dropped, DropReason.STALE.value)
