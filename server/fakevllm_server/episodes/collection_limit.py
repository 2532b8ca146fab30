"""Decide whether a client may begin another episode of a job that collects batches ahead of the
running training step. This module does no I/O.

A job with `async_steps = k` collects at most k batches beyond the batch of the running step. The
limit keeps calls young. A group that is begun within the limit is trained at most k versions later,
if the groups that were begun before it end in time. A group that takes longer may become older than
the job's `max_staleness`. It is then dropped when a step chooses its groups, and not here.
"""

from __future__ import annotations

from dataclasses import dataclass

from fakevllm_adapters.job.model import TrainJob

UNDER_WAY_S = 60.0
"""An incomplete task without a new ended episode for this number of seconds no longer counts as
begun. Otherwise, tasks that clients have given up would keep all clients from beginning others."""
AHEAD = "Enough groups are collected ahead of the training step."


@dataclass(frozen=True, slots=True)
class UntrainedWork:
    """The groups and episodes that were begun and are not trained yet."""

    num_groups: int
    """Number of groups that wait for a training step or are being trained."""
    num_episodes: int
    """Number of episodes that run, and of ended episodes whose tasks wait for other episodes."""


def may_begin_episode(work: UntrainedWork, job: TrainJob) -> bool:
    """Return True if a client may begin an episode of a new task. For a job without `async_steps`,
    always return True.

    >>> job = TrainJob(batch_size=8, num_repeat=4, async_steps=1)
    >>> may_begin_episode(UntrainedWork(num_groups=8, num_episodes=31), job)
    True
    >>> may_begin_episode(UntrainedWork(num_groups=8, num_episodes=32), job)
    False
    """
    if not job.async_steps:
        return True
    limit = (1 + job.async_steps) * job.batch_size * job.num_repeat
    return work.num_groups * job.num_repeat + work.num_episodes < limit
