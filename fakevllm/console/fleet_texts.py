"""What the page Now says about the server, its engines and its clients. The functions do no I/O;
the present time is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fakevllm.console.page_renderer import time_text
from fakevllm.console.sources.engine_loads import EngineLoad
from fakevllm.console.sources.server_status import ServerView
from fakevllm.overwatch.formatting import format_duration
from fakevllm.overwatch.snapshot import Batch, ClientActivity
from fakevllm.runtime.plurals import counted
from fakevllm.runtime.status_rows import ENGINE_STATES
from fakevllm_adapters.protocol.replica_text import replica_state
from fakevllm_adapters.protocol.run_finished import describe_closed_run
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, ReplicaStatus

RECENT_START_S = 600.0
"""Seconds after a start of the server in which the page Now mentions the start at its top."""
UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine in the table of engines."""

    name: str
    state: str
    version: int
    """Version of the weights that the engine serves."""
    running: str
    """Number of requests that the engine samples now, or UNKNOWN."""
    waiting: str
    """Number of requests that wait in the engine's queue, or UNKNOWN."""


def recent_start(view: ServerView, now: float) -> str:
    """Return a sentence about the server's start if the server was started a short time ago.
    Otherwise return an empty text. `now` is in Unix seconds."""
    status = view.status
    if status is None or status.started_at is None or now - status.started_at > RECENT_START_S:
        return ""
    age = format_duration(now - status.started_at)
    return f"The server was started {age} ago, at {time_text(status.started_at)}."


def server_rows(view: ServerView, now: float) -> Iterator[tuple[str, str]]:
    """Yield the facts about the server as (name, value). `now` is in Unix seconds."""
    yield "address", view.url
    status, snapshot = view.status, view.snapshot
    if status is None or snapshot is None:
        return
    if status.started_at is not None:
        age = format_duration(now - status.started_at)
        yield "started", f"{time_text(status.started_at)}, {age} ago"
    if status.rollout:
        yield "engine", _engine_names(status)
    if snapshot.booting_s is not None:
        yield "start of the engine", f"takes {format_duration(snapshot.booting_s)} so far"
    if snapshot.batch is not None and (step := status.global_step):
        yield f"batch of step {step}", _progress(snapshot.batch)
    if status.closed is not None:
        yield "training", describe_closed_run(status.closed)
    if snapshot.running:
        yield "running episodes", str(len(snapshot.running))
    if snapshot.is_paused:
        yield "claims of episodes", "paused: clients get no new episodes"


def engine_rows(view: ServerView) -> Iterator[EngineRow]:
    """Yield the engines that run. An engine whose load is not known is one row."""
    status = view.status
    if status is None or status.engine_status is EngineStatus.OFFLINE:
        return
    if status.replicas:
        yield from _replica_rows(status.replicas, view.loads)
        return
    state = ENGINE_STATES[status.engine_status]
    for load in view.loads:
        name = f"engine {load.name}"
        running, waiting = str(load.num_running), str(load.num_waiting)
        yield EngineRow(name, state, status.weight_version, running, waiting)
    if not view.loads:
        yield EngineRow("engine", state, status.weight_version, UNKNOWN, UNKNOWN)


def _replica_rows(
    replicas: Iterable[ReplicaStatus], loads: Iterable[EngineLoad]
) -> Iterator[EngineRow]:
    """Yield one row for each rollout replica."""
    waiting = {load.name: str(load.num_waiting) for load in loads}
    for replica in replicas:
        state = replica_state(replica.model_dump())
        queue = waiting.get(replica.name, UNKNOWN)
        yield EngineRow(replica.name, state, replica.version, str(replica.running), queue)


def client_rows(clients: Iterable[ClientActivity]) -> Iterator[tuple[str, str, str]]:
    """Yield (id, number of running episodes, time since the last activity) for each client."""
    for client in clients:
        idle = UNKNOWN if client.idle_s is None else f"{format_duration(client.idle_s)} ago"
        yield client.uuid, str(client.running), idle


def _engine_names(status: EngineStatusReply) -> str:
    if status.trainer in ("", status.rollout):
        return status.rollout
    return f"{status.rollout}, trained by {status.trainer}"


def _progress(batch: Batch) -> str:
    if batch.tasks_wanted:
        return f"{batch.tasks} of {counted(batch.tasks_wanted, 'group')}"
    return f"{batch.episodes} of {counted(batch.episodes_wanted, 'answer')}"
