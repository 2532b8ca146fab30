"""When what has come in makes a step, by the swarm protocol's sample-collection methods. Pure.

Two kinds: a batch of tasks, of which the newest are taken and the rest waits; and what there is at
a moment, all of it, tasks that lack episodes too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.group_policy import NON_DUMMY, groups_before_short_step

BY_TASKS = "rollout_until_finish_enough_tasks"


@dataclass(frozen=True, slots=True)
class Collected:
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
class Method:
    is_due: Callable[[Collected, TrainJob], bool]
    takes_all: bool = False
    """Also tasks that lack episodes."""
    is_agreed_on: bool = False
    """By clients, who are asked."""


def method_of(job: TrainJob) -> Method:
    return METHODS[job.swarm_mode_sample_collection_method]


def batches_waiting(found: Collected, job: TrainJob) -> float:
    """At least 1 where a step is due. What is taken whole is one batch, however much it is."""
    method = method_of(job)
    is_due = float(method.is_due(found, job))
    return is_due if method.takes_all else max(found.num_groups / job.batch_size, is_due)


def _enough_tasks(found: Collected, job: TrainJob) -> bool:
    """Where ties are dropped, a step is made of fewer rather than never."""
    enough = groups_before_short_step(job)
    is_enough = enough is not None and found.num_groups + found.num_tied >= enough
    return found.num_groups >= job.batch_size or (is_enough and found.num_groups > 0)


def _enough_episodes(found: Collected, job: TrainJob) -> bool:
    return found.num_episodes >= job.batch_size * job.num_repeat


METHODS = {
    BY_TASKS: Method(_enough_tasks),
    NON_DUMMY: Method(_enough_tasks),
    "rollout_until_finish_enough_episodes": Method(_enough_episodes, takes_all=True),
    "rollout_until_any_client_agree_sync_weight": Method(
        lambda found, _: found.any_agreed, takes_all=True, is_agreed_on=True
    ),
    "rollout_until_all_clients_agree_sync_weight": Method(
        lambda found, _: found.all_agreed, takes_all=True, is_agreed_on=True
    ),
}
