"""Server calls about the engine: its state, its job, start and stop."""

from __future__ import annotations

import logging
from collections.abc import Collection

from pydantic import BaseModel

from fakevllm.sdk.protocol import (
    ENGINE_TIMEOUT_S,
    QUICK_TIMEOUT_S,
    Backoff,
    ServerCall,
    ServerReply,
    ServerRequest,
    fetch,
    fetch_with_retries,
    is_transient,
    send,
)
from fakevllm.sdk.types import ServerUnreachable, SwarmError, SwarmServerOfflineError
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.closed_run import describe_closed_run
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, SuccessReply

log = logging.getLogger("fakevllm.sdk")

CANNOT_CONNECT = "ENGINE.CANNOT_CONNECT"
"""The state that a client reports for a server that does not answer."""
RUNNING = (EngineStatus.ROLLING, EngineStatus.ROLLING_POST, EngineStatus.WEIGHT_SYNCING)
FIND_SERVER_S = 16.0
"""Seconds to wait for a server that is just starting."""


class ControlReply(BaseModel):
    """The reply of `/sync_train_config` and `/start_engine`."""

    success: bool
    error: str = ""
    warnings: list[str] = []


_STATUS = ServerRequest("/get_engine_status", timeout_s=QUICK_TIMEOUT_S)


def status() -> ServerCall[EngineStatusReply]:
    """Return the engine's status. Raises ServerUnreachable, SwarmError."""
    return (yield from fetch(_STATUS, EngineStatusReply))


def status_with_retries(backoff: Backoff) -> ServerCall[EngineStatusReply]:
    """Return the engine's status, and wait for a server that is just starting.

    Raises ServerUnreachable, SwarmError.
    """
    return (yield from fetch_with_retries(_STATUS, EngineStatusReply, backoff))


def sync_job(job: TrainJob) -> ServerCall[None]:
    """Send the job. Raises SwarmError if an engine runs, or if the server refuses the job."""
    request = ServerRequest("/sync_train_config", {"yaml_as_string": job.as_yaml()})
    reply = yield from fetch(request, ControlReply)
    if not reply.success:
        raise SwarmError(f"The server does not take this job: {reply.error}")
    for warning in reply.warnings:
        log.warning("the job's %s", warning)


def train_config() -> ServerCall[TrainJob | None]:
    """Return the server's job; None if it has none, or one that this client cannot parse."""
    reply = yield from send(ServerRequest("/get_train_config", timeout_s=QUICK_TIMEOUT_S))
    try:
        return TrainJob.model_validate(reply.content) if reply.status == 200 else None
    except ValueError:
        return None


def start(timeout_s: float | None) -> ServerCall[EngineStatusReply]:
    """Start the engine, and return its status once it serves requests.

    Raises SwarmError with the reason if it does not come up, and ServerUnreachable if that takes
    longer than `timeout_s`.
    """
    # The server replies once the engine boots: an engine that is off after that was refused.
    reply = yield from fetch(ServerRequest("/start_engine", {}, ENGINE_TIMEOUT_S), ControlReply)
    if not reply.success:
        raise SwarmError(f"The engine was not started: {reply.error}")
    return (yield from wait_for_engine(RUNNING, timeout_s))


def stop() -> ServerCall[None]:
    """Stop the engine, and return once it is off. Does nothing if it is off already."""
    reply = yield from status()
    if reply.engine_status is EngineStatus.OFFLINE:
        return
    yield from fetch(ServerRequest("/stop_engine", {}, ENGINE_TIMEOUT_S), SuccessReply)
    yield from wait_for_engine((EngineStatus.OFFLINE,), None)


def wait_for_engine(
    states: Collection[EngineStatus], timeout_s: float | None
) -> ServerCall[EngineStatusReply]:
    """Wait until the engine, which was on, is in one of `states`.

    Raises SwarmServerOfflineError, with the server's reason, if the engine goes off and OFFLINE is
    not in `states`; ServerUnreachable after `timeout_s`.
    """
    backoff = Backoff(timeout_s)
    while True:
        try:
            reply = yield from status()
        except SwarmError as error:
            if not is_transient(error) or backoff.is_exhausted:
                raise
            yield from backoff.pause(error.detail)
            continue
        if reply.engine_status in states:
            return reply
        if reply.engine_status is EngineStatus.OFFLINE:
            raise SwarmServerOfflineError(
                reply.engine_status_detail
                or "The engine was stopped while this client waited for it."
            )
        if backoff.is_exhausted:
            raise ServerUnreachable(f"The engine is still in {reply.engine_status}.")
        yield from backoff.pause(f"the engine is in {reply.engine_status}")


def ensure_running(job: TrainJob, force_restart: bool, timeout_s: float | None) -> ServerCall[None]:
    """Start the engine with this job, unless it runs already.

    A running engine keeps its own job, and the differences are logged. With `force_restart` it is
    stopped first. Raises SwarmError.
    """
    reply = yield from _find_server()
    if force_restart:
        yield from stop()
    elif reply.engine_status is not EngineStatus.OFFLINE:
        _warn_if_closed((yield from wait_for_engine(RUNNING, timeout_s)))
        return (yield from _warn_of_differences(job))
    yield from sync_job(job)
    _warn_if_closed((yield from start(timeout_s)))


def _find_server() -> ServerCall[EngineStatusReply]:
    try:
        return (yield from status_with_retries(Backoff(FIND_SERVER_S)))
    except ServerUnreachable as error:
        raise ServerUnreachable(
            f"{error.detail}. Start a server with `fakevllm-server start`, or correct the URL."
        ) from None


def _warn_if_closed(reply: EngineStatusReply) -> None:
    if reply.closed is not None:
        log.warning("%s", describe_closed_run(reply.closed))


def _warn_of_differences(job: TrainJob) -> ServerCall[None]:
    reply = yield from send(ServerRequest("/get_train_config", timeout_s=QUICK_TIMEOUT_S))
    differences = job_differences(job, reply)
    if differences:
        log.warning(
            "the engine runs with another job and keeps it: %s. To replace it with this job, use "
            "force_restart=True",
            "; ".join(differences),
        )


def job_differences(job: TrainJob, reply: ServerReply) -> list[str]:
    """Return one text per setting that this client set and the server's job has otherwise.

    `reply` is the reply of `/get_train_config`. Settings that the client left alone are ignored.
    """
    running = reply.content
    if reply.status != 200 or not isinstance(running, dict):
        return []
    wanted = job.model_dump(mode="json", exclude_unset=True)
    return [
        f"{name} is {running[name]!r}, not {value!r}"
        for name, value in wanted.items()
        if name in running and running[name] != value
    ]
