"""Pools, and functions that add groups and episodes to a pool."""

from typing import Any

from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.swarm import SiblingRef
from fakevllm_server.episodes.group_pool import Pool


def pool_of(**settings: Any) -> Pool:
    return Pool(TrainJob.model_validate({"batch_size": 1} | settings))


def captured(
    pool: Pool, group_id: str, siblings: int = 2, version: int = 0, now: float = 0.0
) -> None:
    for index in range(siblings):
        pool.add_call(SiblingRef(group_id, index), call(version), now)


def episode_of(pool: Pool, task: str, reward: float, *versions: int) -> None:
    pool.add_episode(task, reward, [call(version) for version in versions], new_id())


def ended(pool: Pool, name: str, *rewards: float) -> str:
    captured(pool, name, siblings=len(rewards))
    return pool.end_group(name, rewards, step=1).failure_reason
