"""Which groups a step may be made of. Pure.

A partial group is compared as far as it has rewards: a sibling without one has failed for reasons
that are not the model's. One reward alone is compared with nothing. Where all are equal there is no
signal: `filter_groups` says whether the group is a part of its step (with advantage 0, so that KL
and entropy alone pull on it), or is dropped, and whether its step waits for another one then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.algorithms import NEEDS_GREEDY
from fakevllm_server.algorithms.shaping import is_tied, shaped_rewards
from fakevllm_server.types.calls import FinishedGroup

TIED = "tied"
FULL = "pool_full"
"""There is no room for it."""
NON_DUMMY = "rollout_until_finish_enough_non_dummy_tasks"


def why_not_pooled(group: FinishedGroup, job: TrainJob) -> str | None:
    """None where it is."""
    reason = _why_untrainable(group)
    if group.is_sample:
        return reason
    needs_greedy = job.algorithm in NEEDS_GREEDY
    if reason is None and needs_greedy and not any(one.is_greedy for one in group.scored):
        return "no_greedy_answer"
    if reason is None and filtering(job) != "keep" and is_tied(shaped_rewards(group, job)):
        return TIED
    return reason


def filtering(job: TrainJob) -> str:
    """`filter_groups`, which AgentJet's name for collecting says too."""
    method = job.swarm_mode_sample_collection_method
    return "collect" if method == NON_DUMMY else job.filter_groups


def groups_before_short_step(job: TrainJob) -> int | None:
    """After how many groups, dropped ties among them, a step is made of fewer than batch_size; None
    where it never is.

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


# The swarm protocol's sample-collection methods decide when collected groups make a step. One kind
# takes the newest of a batch of tasks and leaves the rest waiting. The other kind takes everything
# there is at one moment, including tasks that lack episodes.

BY_TASKS = "rollout_until_finish_enough_tasks"


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """What waits."""

    num_groups: int
    """Whole, and with signal where ties are dropped."""
    num_tied: int
    """Dropped since the last step."""
    num_episodes: int
    """Of those groups, ties too, and of tasks that lack some."""
    any_agreed: bool = False
    all_agreed: bool = False


@dataclass(frozen=True, slots=True)
class CollectionMethod:
    is_due: Callable[[PoolCounts, TrainJob], bool]
    takes_all: bool = False
    """Also tasks that lack episodes."""
    is_agreed_on: bool = False
    """By clients, who are asked."""


def method_of(job: TrainJob) -> CollectionMethod:
    return METHODS[job.swarm_mode_sample_collection_method]


def batches_waiting(found: PoolCounts, job: TrainJob) -> float:
    """At least 1 where a step is due. What is taken whole is one batch, however much it is."""
    method = method_of(job)
    is_due = float(method.is_due(found, job))
    return is_due if method.takes_all else max(found.num_groups / job.batch_size, is_due)


def _enough_tasks(found: PoolCounts, job: TrainJob) -> bool:
    """Where ties are dropped, a step is made of fewer rather than never."""
    enough = groups_before_short_step(job)
    is_enough = enough is not None and found.num_groups + found.num_tied >= enough
    return found.num_groups >= job.batch_size or (is_enough and found.num_groups > 0)


def _enough_episodes(found: PoolCounts, job: TrainJob) -> bool:
    return found.num_episodes >= job.batch_size * job.num_repeat


METHODS = {
    BY_TASKS: CollectionMethod(_enough_tasks),
    NON_DUMMY: CollectionMethod(_enough_tasks),
    "rollout_until_finish_enough_episodes": CollectionMethod(_enough_episodes, takes_all=True),
    "rollout_until_any_client_agree_sync_weight": CollectionMethod(
        lambda found, _: found.any_agreed, takes_all=True, is_agreed_on=True
    ),
    "rollout_until_all_clients_agree_sync_weight": CollectionMethod(
        lambda found, _: found.all_agreed, takes_all=True, is_agreed_on=True
    ),
}
