"""The batch that is being collected, as the swarm protocol shows it to clients."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.batch_status import PoolInformation
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.algorithms.reward_penalties import is_tied
from fakevllm_server.episodes.batch_selection import method_of
from fakevllm_server.episodes.episode_registry import Episode
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.types.calls import ScoredEpisode
from fakevllm_server.web.server_state import ServerState


def pool_information(state: ServerState) -> PoolInformation:
    """Return the batch that is being collected: the groups and episodes that wait to be trained,
    the claimed episodes, and the engine's status.

    The target numbers of groups and episodes are taken from the job. If no client has sent a job
    yet, the job's default settings apply.
    """
    pool, job = state.pool, state.job or TrainJob()
    tasks = _tasks(pool)
    is_booting = state.engine.status is EngineStatus.BOOTING
    by_tasks = not method_of(job).takes_all
    return PoolInformation(
        sample_collection_method=job.swarm_mode_sample_collection_method,
        completed_episodes=pool.counts.num_episodes,
        completed_episode_target=job.batch_size * job.num_repeat,
        completed_tasks=pool.num_finished,
        completed_task_target=job.batch_size if by_tasks else 0,
        completed_non_dummy_tasks=sum(not is_tied(group.rewards) for group in pool.finished),
        completed_non_dummy_task_target=job.batch_size if by_tasks else 0,
        task_expected_num_repeat=job.num_repeat,
        completed_tasks_details={
            task_id: [one.owner for one in episodes if one.reward is not None]
            for task_id, episodes in tasks.items()
        },
        completed_tasks_rewards={
            task_id: _rewards(episodes) for task_id, episodes in tasks.items()
        },
        running_episode_details=_claimed_episodes(state.episodes.claimed) or None,
        engine_status=state.engine.status,
        global_step=state.engine.global_step,
        booting_start_time=time.time() - state.engine.seconds_in_state(time.monotonic())
        if is_booting
        else None,
        completed_tasks_client_uuids=dict(_clients_by_task(state, tasks)),
        training_model_path=state.model,
        swarm_client_instruction={"active_clients": _active_clients(pool)},
    )


def _tasks(pool: Pool) -> dict[str, list[ScoredEpisode]]:
    """Return the waiting episodes of each task, by task id. The pool has the episodes and groups
    that wait to be trained. Each group of answers to an app's request counts as a task."""
    tasks: dict[str, list[ScoredEpisode]] = defaultdict(list)
    for group in pool.finished:
        tasks[group.task_id] += group.episodes
    for task_id, episodes in pool.partial:
        tasks[task_id] += episodes
    return tasks


def _rewards(episodes: Sequence[ScoredEpisode]) -> list[float]:
    return [one.reward for one in episodes if one.reward is not None]


def _claimed_episodes(claimed: Sequence[Episode]) -> dict[str, dict[str, str]]:
    now = time.monotonic()
    return {
        one.uuid: {
            "episode_status": "claimed",
            "time_since_last_activity": f"{now - one.last_activity:.1f}s",
            "discard_episode_timeout": f"{one.idle_limit_s:.1f}s",
            "llm_call_count": str(len(one.calls) + one.in_flight),
            "client_uuid": one.client_uuid,
            "optional_task_id": one.task_id,
        }
        for one in claimed
    }


def _clients_by_task(
    state: ServerState, tasks: dict[str, list[ScoredEpisode]]
) -> Iterator[tuple[str, list[str]]]:
    for task_id, episodes in tasks.items():
        clients = [state.participation.client_of(one.owner) for one in episodes]
        known = [client for client in clients if client is not None]
        if known:
            yield task_id, known


def _active_clients(pool: Pool) -> list[dict[str, str | float | bool]]:
    monotonic_zero = time.time() - time.monotonic()  # Unix time at which the clock was 0
    return [
        {
            "client_uuid": client.client_uuid,
            "last_activity_at": monotonic_zero + client.last_activity,
            "allowed_sync_weight": client.has_agreed,
        }
        for client in pool.clients
    ]
