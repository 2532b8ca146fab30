"""Requests about the engine: its state, its job, its start and stop, and the batch that it
collects. Each function is a generator that yields requests to a driver (see the module `protocol`).
The driver sends the requests."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, cast

from pydantic import BaseModel

from fakevllm.sdk.protocol import (
    ENGINE_TIMEOUT_S,
    QUICK_TIMEOUT_S,
    TRANSIENT_STATUSES,
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
from fakevllm_adapters.protocol.batch_status import (
    AgreeRequest,
    EpisodeBuffer,
    EpisodeStatus,
    ExperimentDirReply,
    PoolInformation,
)
from fakevllm_adapters.protocol.run_finished import describe_closed_run
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, SuccessReply

log = logging.getLogger("fakevllm.sdk")

CANNOT_CONNECT = "ENGINE.CANNOT_CONNECT"
"""The state that a client reports for a server that does not answer."""
RUNNING = (EngineStatus.ROLLING, EngineStatus.ROLLING_POST, EngineStatus.WEIGHT_SYNCING)
FIND_SERVER_S = 16.0
"""Seconds to wait for a server that has just been started and does not answer yet."""
RUN_SETTINGS = ("experiment_name", "model")
"""Settings of a job that decide to which run of the server the job belongs."""
POOL_PATH = "/get_current_batch_rollout_pool_information"
STEPPING = (EngineStatus.ROLLING_POST, EngineStatus.WEIGHT_SYNCING)
AGREE_INTERVAL_S = 2.0
MAX_REFUSED_S = 600.0
"""Seconds for which the server may refuse an agreement to the next step before the client raises an
error. The server refuses the agreement until the client has ended an episode since the last step.
During these seconds, another thread of the client may end such an episode."""


class ControlReply(BaseModel):
    """The reply of `/sync_train_config` and `/start_engine`."""

    success: bool
    error: str = ""
    warnings: list[str] = []


_STATUS = ServerRequest("/get_engine_status", timeout_s=QUICK_TIMEOUT_S)


def status() -> ServerCall[EngineStatusReply]:
    """Return the engine's status. Raises ServerUnreachable if no server answers, and SwarmError if
    the server refuses the request."""
    return (yield from fetch(_STATUS, EngineStatusReply))


def status_with_retries(backoff: Backoff) -> ServerCall[EngineStatusReply]:
    """Return the engine's status. If no server answers, retry with the pauses of `backoff`, because
    the server may be starting.

    Raises ServerUnreachable if no server has answered within the time limit of `backoff`. Raises
    SwarmError if the server refuses the request.
    """
    return (yield from fetch_with_retries(_STATUS, EngineStatusReply, backoff))


def sync_job(job: TrainJob) -> ServerCall[None]:
    """Send the training job to the server. Raises SwarmError if an engine is running, or if the
    server refuses the job."""
    request = ServerRequest("/sync_train_config", {"yaml_as_string": job.as_yaml()})
    reply = yield from fetch(request, ControlReply)
    if not reply.success:
        raise SwarmError(f"The server does not take this job: {reply.error}")
    for warning in reply.warnings:
        log.warning("the job's %s", warning)


def train_config() -> ServerCall[TrainJob | None]:
    """Return the server's training job. Return None if the server has no job, or if this client
    cannot parse the job."""
    reply = yield from send(ServerRequest("/get_train_config", timeout_s=QUICK_TIMEOUT_S))
    try:
        return TrainJob.model_validate(reply.content) if reply.status == 200 else None
    except ValueError:
        return None


def start(timeout_s: float | None) -> ServerCall[EngineStatusReply]:
    """Start the engine, and return its status once the engine serves requests.

    Raises SwarmError with the reason if the engine cannot be started. Raises ServerUnreachable if
    the start takes longer than `timeout_s` seconds. If `timeout_s` is None, there is no limit.
    """
    backoff = Backoff(timeout_s)
    # The server replies once the engine boots: an engine that is off after that was refused.
    while not (yield from _try_start(backoff)):
        # A server whose disk was full may have started the engine by itself.
        if (yield from status()).engine_status is not EngineStatus.OFFLINE:
            break
    return (yield from wait_for_engine(RUNNING, timeout_s))


def _try_start(backoff: Backoff) -> ServerCall[bool]:
    """Ask the server to start the engine, and return True if the server starts it. If the server
    cannot start the engine at the moment, wait for one pause of `backoff` and return False.

    Raises SwarmError if the server refuses the start, or if the time limit of `backoff` is reached.
    """
    try:
        reply = yield from fetch(ServerRequest("/start_engine", {}, ENGINE_TIMEOUT_S), ControlReply)
    except SwarmError as error:
        if error.status not in TRANSIENT_STATUSES or backoff.is_exhausted:
            raise
        yield from backoff.pause(error.detail)
        return False
    if not reply.success:
        raise SwarmError(f"The engine was not started: {reply.error}")
    return True


def stop() -> ServerCall[None]:
    """Stop the engine, and return once the engine is off. If the engine is already off, do
    nothing."""
    reply = yield from status()
    if reply.engine_status is EngineStatus.OFFLINE:
        return
    yield from fetch(ServerRequest("/stop_engine", {}, ENGINE_TIMEOUT_S), SuccessReply)
    yield from wait_for_engine((EngineStatus.OFFLINE,), None)


def wait_for_engine(
    states: Collection[EngineStatus], timeout_s: float | None
) -> ServerCall[EngineStatusReply]:
    """Wait until the engine is in one of `states`, and return its status.

    If the engine is off and `states` does not include OFFLINE, raises SwarmServerOfflineError with
    the server's reason. Raises ServerUnreachable after `timeout_s` seconds.
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
        yield from backoff.pause(f"the engine's state is {reply.engine_status.name}")


def ensure_running(job: TrainJob, force_restart: bool, timeout_s: float | None) -> ServerCall[None]:
    """Start the engine with this job, unless the engine is already running.

    Without `force_restart`, an engine that is already running keeps its own job, and the
    differences between its job and this job are logged. With `force_restart`, a running engine is
    stopped first, and then started with this job. Raises SwarmError if the engine cannot be started
    with this job. Also raises SwarmError if another client replaced the job before the start, and
    the engine therefore trains another experiment or model.
    """
    reply = yield from _find_server()
    if force_restart:
        yield from stop()
    elif reply.engine_status is not EngineStatus.OFFLINE:
        return (yield from _use_running_engine(job, timeout_s))
    try:
        yield from sync_job(job)
        reply = yield from start(timeout_s)
        yield from _check_started_job(job)
        _warn_if_closed(reply)
    except SwarmError as error:
        # Another client, such as the same script on another machine, may have started the engine.
        if error.status != 400 or (yield from status()).engine_status is EngineStatus.OFFLINE:
            raise
        yield from _use_running_engine(job, timeout_s)


def _use_running_engine(job: TrainJob, timeout_s: float | None) -> ServerCall[None]:
    _warn_if_closed((yield from wait_for_engine(RUNNING, timeout_s)))
    yield from _warn_of_differences(job)


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


def _check_started_job(job: TrainJob) -> ServerCall[None]:
    """Compare the job that this client has sent with the job that the engine was started with, and
    log the differences.

    The jobs differ if another client sent a job after this client and before the start. Raises
    SwarmError if the engine therefore trains another experiment or another model.
    """
    reply = yield from send(ServerRequest("/get_train_config", timeout_s=QUICK_TIMEOUT_S))
    content: object = reply.content
    if reply.status == 200 and isinstance(content, dict):
        started = cast(dict[str, Any], content)
        for name in RUN_SETTINGS:
            wanted = getattr(job, name) or None
            running = started.get(name, wanted) or None
            if wanted != running:
                raise SwarmError(
                    f"Another client changed the server's job while the engine was started: "
                    f"{name} is {running!r}, not {wanted!r}. To replace that job, use "
                    "force_restart=True, or use another server."
                )
    _log_differences(job, reply)


def _warn_of_differences(job: TrainJob) -> ServerCall[None]:
    reply = yield from send(ServerRequest("/get_train_config", timeout_s=QUICK_TIMEOUT_S))
    _log_differences(job, reply)


def _log_differences(job: TrainJob, reply: ServerReply) -> None:
    differences = job_differences(job, reply)
    if differences:
        log.warning(
            "the engine runs with another job and keeps it: %s. To replace it with this job, use "
            "force_restart=True",
            "; ".join(differences),
        )


def job_differences(job: TrainJob, reply: ServerReply) -> list[str]:
    """Return a list with one text for each setting whose value in the server's job differs from its
    value in this client's job.

    `reply` is the server's reply to `/get_train_config`. Settings that this client has not set are
    ignored.
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


# --- the batch that is being collected


def pool_information() -> ServerCall[PoolInformation]:
    return (yield from fetch(ServerRequest(POOL_PATH, timeout_s=QUICK_TIMEOUT_S), PoolInformation))


def episode_buffer() -> ServerCall[list[EpisodeStatus]]:
    request = ServerRequest("/get_episode_buffer", {}, QUICK_TIMEOUT_S)
    return (yield from fetch(request, EpisodeBuffer)).buffer


def experiment_dir() -> ServerCall[str]:
    """Return the path of the server's folder for the run. Raises SwarmError if the engine has never
    been started, because there is no run before the first start."""
    request = ServerRequest("/get_server_experiment_dir", timeout_s=QUICK_TIMEOUT_S)
    reply = yield from fetch(request, ExperimentDirReply)
    if reply.server_experiment_dir is None:
        raise SwarmError("No engine has been started: there is no run yet.")
    return reply.server_experiment_dir


def agree(client_uuid: str) -> ServerCall[bool]:
    """Agree to the next training step, and wait until the step begins.

    The server accepts an agreement only after the client has ended an episode since the last step.
    The agreement is sent repeatedly until the step begins, because a server forgets agreements when
    it restarts.

    Return True if the server accepted the agreement, and then began a step or dropped the batch.
    Return False if the engine does not collect a batch, or if a step began without this client's
    agreement. Raises SwarmError if the server refuses the agreement for MAX_REFUSED_S seconds.
    """
    body = AgreeRequest(client_uuid=client_uuid).model_dump()
    request = ServerRequest("/agree_sync_weight", body)
    backoff = Backoff(None, AGREE_INTERVAL_S)
    refused_backoff = Backoff(MAX_REFUSED_S, AGREE_INTERVAL_S)
    step = accepted_by = None
    while True:
        reply = yield from fetch_with_retries(request, SuccessReply, Backoff(None))
        status = yield from status_with_retries(Backoff(None))
        if reply.success:
            accepted_by = status.server_id
            refused_backoff = Backoff(MAX_REFUSED_S, AGREE_INTERVAL_S)
        elif accepted_by == status.server_id:  # the batch is over, perhaps without a step
            return True
        has_agreed = accepted_by is not None
        has_stepped = step is not None and (status.global_step or 0) > step
        if has_stepped or status.engine_status in STEPPING:
            return has_agreed
        if status.engine_status is EngineStatus.OFFLINE:
            return False
        step = status.global_step or 0  # a restarted server may be at an earlier step
        if status.engine_status is EngineStatus.BOOTING:
            if not has_agreed:
                return False
            yield from backoff.pause(f"the engine's state is {status.engine_status.name}")
        elif reply.success:
            yield from backoff.pause("the other clients have not agreed yet")
        elif refused_backoff.is_exhausted:
            raise SwarmError(reply.failure_reason)
        else:
            yield from refused_backoff.pause(reply.failure_reason)
