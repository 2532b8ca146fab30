"""Decide which groups are pooled, and when the pooled groups are enough for a step. Pure.

In a partial group, the siblings with rewards are compared with each other: a sibling without a
reward failed for a reason that is not the model's. A group with a single reward is not trained. If
all rewards are equal, the group has no signal, and `filter_groups` decides:

* `keep`: the group is part of its step with advantage 0, so that only KL and entropy affect it.
* `drop`: the group is dropped, and the step may have fewer groups.
* `collect`: the group is dropped, and the step waits for another group, within the limit
  `max_num_gen_batches`.

The swarm protocol's sample-collection methods decide when a step is made. Some methods take the
newest groups of a batch, and the other groups wait. Other methods take everything at one moment,
including tasks that lack episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.algorithms import NEEDS_GREEDY
from fakevllm_server.algorithms.reward_penalties import is_tied, shaped_rewards
from fakevllm_server.types.calls import FinishedGroup

TIED = "tied"
"""Reason of a group whose rewards are all equal."""
FULL = "pool_full"
"""Reason of a group that was dropped because the pool was full."""
BY_TASKS = "rollout_until_finish_enough_tasks"
NON_DUMMY = "rollout_until_finish_enough_non_dummy_tasks"


def why_not_pooled(group: FinishedGroup, job: TrainJob) -> str | None:
    """Return the reason why a group is not pooled; None if it is."""
    reason = _why_untrainable(group)
    if group.is_sample:
        return reason
    needs_greedy = job.algorithm in NEEDS_GREEDY
    if reason is None and needs_greedy and not any(episode.is_greedy for episode in group.scored):
        return "no_greedy_answer"
    if reason is None and filtering(job) != "keep" and is_tied(shaped_rewards(group, job)):
        return TIED
    return reason


def filtering(job: TrainJob) -> str:
    """Return the effective `filter_groups`; AgentJet's method NON_DUMMY means `collect`."""
    method = job.swarm_mode_sample_collection_method
    return "collect" if method == NON_DUMMY else job.filter_groups


def groups_before_short_step(job: TrainJob) -> int | None:
    """Return the number of groups after which a step has fewer than batch_size groups.

    Dropped tied groups count. None means that a step always waits for batch_size groups.

    >>> groups_before_short_step(TrainJob(filter_groups="drop", batch_size=4))
    4
    """
    if filtering(job) == "keep":
        return None
    return job.batch_size * (job.max_num_gen_batches if filtering(job) == "collect" else 1)


def _why_untrainable(group: FinishedGroup) -> str | None:
    if len(group.rewards) < 2 and not group.is_sample:
        return "fewer_than_two_rewards"
    if not any(episode.trains for episode in group.episodes):
        reasons = {call.untrainable for e in group.episodes for call in e.calls if call.untrainable}
        return "no_trainable_call" + (f": {'; '.join(sorted(reasons))}" if reasons else "")
    return None


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Numbers of waiting groups and episodes, and whether clients agreed to a step."""

    num_groups: int
    """Number of pooled groups. If ties are dropped, all of them have a signal."""
    num_tied: int
    """Number of tied groups that were dropped since the last step."""
    num_episodes: int
    """Number of episodes in pooled groups, in dropped tied groups, and in incomplete tasks."""
    any_agreed: bool = False
    all_agreed: bool = False


@dataclass(frozen=True, slots=True)
class CollectionMethod:
    """A method that decides when a step is made, and which groups the step takes."""

    is_due: Callable[[PoolCounts, TrainJob], bool]
    """Returns whether a step is due."""
    takes_all: bool = False
    """Whether a step takes everything, including tasks that lack episodes."""
    is_agreed_on: bool = False
    """Whether clients decide by their agreement when a step is due."""


def method_of(job: TrainJob) -> CollectionMethod:
    """Return the collection method that a job chooses."""
    return METHODS[job.swarm_mode_sample_collection_method]


def batches_waiting(counts: PoolCounts, job: TrainJob) -> float:
    """Return how many batches wait; at least 1 if a step is due.

    If a step takes everything, then everything is one batch.
    """
    method = method_of(job)
    is_due = float(method.is_due(counts, job))
    return is_due if method.takes_all else max(counts.num_groups / job.batch_size, is_due)


def _enough_tasks(counts: PoolCounts, job: TrainJob) -> bool:
    """Return whether there are enough groups for a step.

    If ties are dropped, the step may have fewer than batch_size groups. Otherwise a run in which
    most groups are tied would make no step.
    """
    enough = groups_before_short_step(job)
    is_enough = enough is not None and counts.num_groups + counts.num_tied >= enough
    return counts.num_groups >= job.batch_size or (is_enough and counts.num_groups > 0)


def _enough_episodes(counts: PoolCounts, job: TrainJob) -> bool:
    return counts.num_episodes >= job.batch_size * job.num_repeat


METHODS = {
    BY_TASKS: CollectionMethod(_enough_tasks),
    NON_DUMMY: CollectionMethod(_enough_tasks),
    "rollout_until_finish_enough_episodes": CollectionMethod(_enough_episodes, takes_all=True),
    "rollout_until_any_client_agree_sync_weight": CollectionMethod(
        lambda counts, _: counts.any_agreed, takes_all=True, is_agreed_on=True
    ),
    "rollout_until_all_clients_agree_sync_weight": CollectionMethod(
        lambda counts, _: counts.all_agreed, takes_all=True, is_agreed_on=True
    ),
}
