"""Several servers at once: one agent, several models that learn."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from fakevllm.client.driving import bare_url
from fakevllm.client.episode import Episode
from fakevllm.client.errors import SwarmError
from fakevllm.client.executors import DaemonPool
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import Task, WorkflowOutput

if TYPE_CHECKING:
    from fakevllm.client.swarm_client import SwarmClient


def start_engines(
    clients: Sequence[tuple[SwarmClient, TrainJob]], force_restart: bool = False
) -> None:
    """Each server's engine with its job, side by side, for large models take minutes. Raises
    SwarmError with what each one that failed said."""

    def start(one: tuple[SwarmClient, TrainJob]) -> str | None:
        client, job = one
        try:
            client.auto_sync_train_config_and_start_engine(job, force_restart)
        except SwarmError as error:
            return f"{bare_url(client.server_url)}: {error}"
        return None

    pool = DaemonPool(len(clients))
    told = [one.result() for one in [pool.submit(start, client) for client in clients]]
    pool.shutdown()
    failures = [one for one in told if one is not None]
    if failures:
        raise SwarmError("; ".join(failures))


@contextlib.contextmanager
def episodes_together(
    clients: Sequence[SwarmClient], task: Task, discard_episode_timeout: float = 240.0
) -> Generator[list[Episode]]:
    """An episode of each server for one run of an agent; all of them end, or all are aborted.

    `end` keeps the outcome; the servers are told when the block is left, after each has said that
    its claim still stands. All are aborted where the block raises, where one has no outcome, or
    where one claim is gone (EpisodeLost). A server that loses its claim in the instant between
    being asked and being told is the one case in which the others have ended.
    """
    outputs: dict[str, WorkflowOutput] = {}
    with contextlib.ExitStack() as held:
        episodes = [_begin(held, one, task, discard_episode_timeout, outputs) for one in clients]
        yield episodes
        if len(outputs) < len(episodes):
            return
        for client, episode in zip(clients, episodes, strict=True):
            client.renew_episode(episode.uuid)
        for client, episode in zip(clients, episodes, strict=True):
            client.end_episode(task, episode.uuid, outputs.pop(episode.uuid))


def _begin(
    held: contextlib.ExitStack,
    client: SwarmClient,
    task: Task,
    idle_limit_s: float,
    outputs: dict[str, WorkflowOutput],
) -> Episode:
    """Aborted at the end, unless it has ended by then, which an abort does not change."""
    uuid, access = client.open_claims.begin(lambda: client.begin_episode(idle_limit_s))
    held.callback(client.open_claims.let_go, uuid)
    held.callback(client.abort_episode, uuid)

    def keep(output: WorkflowOutput) -> None:
        outputs[uuid] = output

    return Episode(task, access, keep)
