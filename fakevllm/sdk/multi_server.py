"""Functions for an agent that uses several models. Each of these models is trained by a swarm
server of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from fakevllm.sdk.episode import Episode
from fakevllm.sdk.episode_executors import DaemonThreadPool
from fakevllm.sdk.http_driver import bare_url
from fakevllm.sdk.types import SwarmError
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import Task, WorkflowOutput

if TYPE_CHECKING:
    from fakevllm.sdk.client import SwarmClient


def start_engines(
    clients: Sequence[tuple[SwarmClient, TrainJob]], force_restart: bool = False
) -> None:
    """Start the engine of each server with its job. `clients` contains pairs of a client and the
    job for its server. The engines start in parallel, because a large model needs minutes to start.

    Raises SwarmError if any start failed. The message contains the error of each server whose
    engine did not start.
    """

    def start(client: SwarmClient, job: TrainJob) -> str | None:
        try:
            client.auto_sync_train_config_and_start_engine(job, force_restart)
        except SwarmError as error:
            return f"{bare_url(client.server_url)}: {error}"
        return None

    pool = DaemonThreadPool(len(clients))
    futures = [pool.submit(start, client, job) for client, job in clients]
    errors = [error for future in futures if (error := future.result()) is not None]
    pool.shutdown()
    if errors:
        raise SwarmError("; ".join(errors))


@contextlib.contextmanager
def episodes_together(
    clients: Sequence[SwarmClient], task: Task, discard_episode_timeout: float = 240.0
) -> Generator[list[Episode]]:
    """Claim one episode at each server for one run of an agent. At the end of the `with` block,
    either all episodes end or all are aborted.

    In the block, `Episode.end` only stores the output. When the block is left, the episodes end in
    two steps. First, each server must confirm that the claim of its episode is still valid. Then
    the outputs are sent one after the other. All episodes are aborted if the block raises, if an
    episode has no output, or if a claim is lost (EpisodeLost).

    There is one exception. A claim may be lost after its confirmation, when other outputs have
    already been sent. The episodes of those outputs have ended and cannot be aborted.
    """
    outputs: dict[str, WorkflowOutput] = {}
    with contextlib.ExitStack() as claims:
        episodes = [
            _begin(claims, client, task, discard_episode_timeout, outputs) for client in clients
        ]
        yield episodes
        if len(outputs) < len(episodes):
            return
        for client, episode in zip(clients, episodes, strict=True):
            client.renew_episode(episode.uuid)
        for client, episode in zip(clients, episodes, strict=True):
            client.end_episode(task, episode.uuid, outputs.pop(episode.uuid))


def _begin(
    claims: contextlib.ExitStack,
    client: SwarmClient,
    task: Task,
    idle_limit_s: float,
    outputs: dict[str, WorkflowOutput],
) -> Episode:
    """Claim an episode and return it. The episode's `end` method stores the output in the dict
    `outputs` and sends nothing. When the exit stack `claims` is closed, it aborts the episode,
    unless the episode has already ended at the server."""
    uuid, access = client.open_claims.open(lambda: client.begin_episode(idle_limit_s))
    claims.callback(client.open_claims.release, uuid)
    claims.callback(client.abort_episode, uuid)

    def store(output: WorkflowOutput) -> None:
        outputs[uuid] = output

    return Episode(task, access, store)
