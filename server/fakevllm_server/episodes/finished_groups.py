"""The queue of groups that wait to be trained, in order of arrival. A group has answers to one
task, with rewards.

The numbers of groups and of their tokens are bounded. This module does no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from fakevllm_adapters.job.model import MAX_BATCH_SIZE, TrainJob
from fakevllm_server.algorithms.staleness import keep_fresh
from fakevllm_server.episodes.group_filter import why_not_pooled
from fakevllm_server.types.calls import FinishedGroup

MAX_FINISHED_GROUPS = MAX_BATCH_SIZE
MAX_TOKENS = 20_000_000
"""Maximum number of tokens in all waiting groups. If there are more tokens, or more groups than
MAX_FINISHED_GROUPS, the group that was sampled by the oldest weights is dropped, because this group
would become stale first."""


class FinishedGroups:
    """The queue of groups that wait for a training step."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, FinishedGroup] = OrderedDict()
        self._versions: dict[str, int] = {}
        """Maps the id of each group to the oldest version of the weights that sampled the group.
        The version is cached, because a group computes its version from all of its calls."""
        self.num_tokens = self.num_episodes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def __iter__(self) -> Iterator[FinishedGroup]:
        """Iterate over a copy of the queue, because groups may be removed during the iteration."""
        return iter(list(self._groups.values()))

    def add(self, group: FinishedGroup) -> list[str]:
        """Add a group to the groups that wait for a training step. Return the ids of the groups
        that were dropped because the queue was full.

        The added group itself may be among the dropped groups.
        """
        self.put(group)
        dropped: list[str] = []
        while len(self._groups) > MAX_FINISHED_GROUPS or self.num_tokens > MAX_TOKENS:
            # Among groups of equal version, min returns the one that came first.
            dropped.append(min(self._groups, key=self._versions.__getitem__))
            self.remove(dropped[-1])
        return dropped

    def put(self, group: FinishedGroup) -> None:
        """Append a group to the groups that wait for a training step, without checking the bounds.
        If the queue already has a group with the same id, replace that group instead."""
        before = self._groups.get(group.group_id)
        self.num_tokens += group.num_tokens - (before.num_tokens if before is not None else 0)
        self.num_episodes += len(group.episodes) - (len(before.episodes) if before else 0)
        self._groups[group.group_id] = group
        self._versions[group.group_id] = group.version

    def next_batch(self, num: int, num_ahead: int = 0) -> list[str]:
        """Return the ids of the `num` groups that the next step should take, in order of arrival.

        These are groups among the `num` + `num_ahead` newest groups in the queue. Of them, the
        groups of the oldest weights are taken, because these groups would become stale first. Among
        groups of equal weights, the groups that came first are taken.
        """
        newest = list(self._groups)[-(num + num_ahead) :]
        taken = set(sorted(newest, key=self._versions.__getitem__)[:num])
        return [group_id for group_id in newest if group_id in taken]

    def remove(self, group_id: str) -> FinishedGroup:
        """Remove the group with this id from the queue, and return the group."""
        group = self._groups.pop(group_id)
        del self._versions[group_id]
        self.num_tokens -= group.num_tokens
        self.num_episodes -= len(group.episodes)
        return group

    def drop_stale(self, version: int, job: TrainJob) -> tuple[list[str], int]:
        """Drop the stale model calls of the waiting groups. A call is stale if its weights are more
        than `max_staleness` versions older than `version`.

        Groups that cannot be trained without these calls are dropped too. Return (ids of the
        dropped groups, number of dropped calls).
        """
        dropped: list[str] = []
        num_calls = 0
        for group in self:
            fresh, num_stale = keep_fresh(group, version, job.max_staleness)
            num_calls += num_stale
            if num_stale and why_not_pooled(fresh, job) is not None:
                dropped.append(self.remove(group.group_id).group_id)
            elif num_stale:
                self.put(fresh)
        return dropped, num_calls

    def clear(self) -> list[str]:
        """Remove all groups from the queue, and return their ids."""
        ids = list(self._groups)
        for group_id in ids:
            self.remove(group_id)
        return ids
