"""Decide when a training step is due, and choose the waiting groups for its batch. This module does
no I/O.

Both decisions depend on the job's sample-collection method. Some methods take the newest
`batch_size` groups, and older groups continue to wait. The other methods take all groups at once,
even groups that do not have all of their episodes yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.episodes.group_filter import NON_DUMMY, filtering

BY_TASKS = "rollout_until_finish_enough_tasks"


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """The numbers of groups and episodes that wait for a training step, and whether the clients
    agreed to train on them."""

    num_groups: int
    """Number of pooled groups. If the job drops tied groups (groups whose rewards are all equal),
    no tied group is among them."""
    num_tied: int
    """Number of tied groups that were dropped since the last step."""
    num_episodes: int
    """Number of episodes in pooled groups, in dropped tied groups, and in incomplete tasks."""
    any_agreed: bool = False
    all_agreed: bool = False


@dataclass(frozen=True, slots=True)
class CollectionMethod:
    """A method of collecting samples. It decides when a training step is due, and which groups the
    step takes."""

    is_due: Callable[[PoolCounts, TrainJob], bool]
    """Returns whether a step is due."""
    takes_all: bool = False
    """Whether a step takes all groups, including groups that do not have all of their episodes."""
    is_agreed_on: bool = False
    """Whether clients decide by their agreement when a step is due."""

    def num_taken(self, num_groups: int, job: TrainJob) -> int:
        """Return how many groups a step takes at most when `num_groups` groups wait: either all of
        them, or only the newest `batch_size`.

        The newest groups are preferred because they were sampled by the weights closest to the
        current weights.
        """
        return num_groups if self.takes_all else job.batch_size


def method_of(job: TrainJob) -> CollectionMethod:
    """Return the sample-collection method that a job's settings choose."""
    return METHODS[job.swarm_mode_sample_collection_method]


def groups_before_short_step(job: TrainJob) -> int | None:
    """Return the number of collected groups at which a step starts even with fewer than
    `batch_size` trainable groups. Return None if a step always waits for `batch_size` trainable
    groups.

    Tied groups (groups whose rewards are all equal) count in this number, although they are dropped
    and not trained. If they did not count, a run in which most groups are tied would never make a
    step.

    >>> groups_before_short_step(TrainJob(filter_groups="drop", batch_size=4))
    4
    """
    if filtering(job) == "keep":
        return None
    return job.batch_size * (job.max_num_gen_batches if filtering(job) == "collect" else 1)


def batches_waiting(counts: PoolCounts, job: TrainJob) -> float:
    """Return how many batches the waiting groups would fill. The number may be a fraction, and is
    at least 1 if a training step is due.

    Some sample-collection methods take all groups at once. For these methods, the number is 1 if a
    step is due, and 0 if no step is due.
    """
    method = method_of(job)
    is_due = float(method.is_due(counts, job))
    return is_due if method.takes_all else max(counts.num_groups / job.batch_size, is_due)


def _enough_tasks(counts: PoolCounts, job: TrainJob) -> bool:
    """Return True if there are enough groups for a training step.

    Normally, `batch_size` groups are enough. If the job drops tied groups (groups whose rewards are
    all equal), the step may have fewer groups. Otherwise a run in which most groups are tied would
    never make a step.
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
