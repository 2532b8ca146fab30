"""Talks about the engine: its state, its job, start and stop."""

from __future__ import annotations

import logging
from collections.abc import Collection

from pydantic import BaseModel

from fakevllm.sdk.protocol import (
    ENGINE_TIMEOUT_S,
    QUICK_TIMEOUT_S,
    Answer,
    Ask,
    Patience,
    Talk,
    answered,
    asked,
    insisted,
    is_passing,
)
from fakevllm.sdk.types import ServerUnreachable, SwarmError, SwarmServerOfflineError
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.closed_run import describe_closed_run
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, SuccessReply

log = logging.getLogger("fakevllm.sdk")

CANNOT_CONNECT = "ENGINE.CANNOT_CONNECT"
"""A client's own word for a server that does not answer."""
RUNNING = (EngineStatus.ROLLING, EngineStatus.ROLLING_POST, EngineStatus.WEIGHT_SYNCING)
FIND_SERVER_S = 16.0
"""How long a server that is just being started is waited for."""


class Done(BaseModel):
    """What the control routes answer."""

    success: bool
    error: str = ""
    warnings: list[str] = []


_STATUS = Ask("/get_engine_status", timeout_s=QUICK_TIMEOUT_S)


def status() -> Talk[EngineStatusReply]:
    """Raises ServerUnreachable, SwarmError."""
    return (yield from asked(_STATUS, EngineStatusReply))


def status_from(patience: Patience) -> Talk[EngineStatusReply]:
    """Also of a server that is just being started. Raises ServerUnreachable, SwarmError."""
    return (yield from insisted(_STATUS, EngineStatusReply, patience))


def sync_job(job: TrainJob) -> Talk[None]:
    """Raises SwarmError where an engine runs, or the server does not take the job."""
    ask = Ask("/sync_train_config", {"yaml_as_string": job.as_yaml()})
    done = yield from asked(ask, Done)
    if not done.success:
        raise SwarmError(f"The server does not take this job: {done.error}")
    for warning in done.warnings:
        log.warning("the job's %s", warning)


def train_config() -> Talk[TrainJob | None]:
    """The job the server has; None while it has none, or one that this client cannot read."""
    answer = yield from answered(Ask("/get_train_config", timeout_s=QUICK_TIMEOUT_S))
    try:
        return TrainJob.model_validate(answer.content) if answer.status == 200 else None
    except ValueError:
        return None


def start(limit_s: float | None) -> Talk[EngineStatusReply]:
    """Returns once the engine answers. Raises SwarmError with the reason where it does not come up,
    ServerUnreachable where that takes longer than `limit_s`."""
    # The server answers once the engine boots: where it is off after that, it was refused.
    done = yield from asked(Ask("/start_engine", {}, ENGINE_TIMEOUT_S), Done)
    if not done.success:
        raise SwarmError(f"The engine was not started: {done.error}")
    return (yield from until(RUNNING, limit_s))


def stop() -> Talk[None]:
    """Returns once the engine is off; nothing happens where it is."""
    known = yield from status()
    if known.engine_status is EngineStatus.OFFLINE:
        return
    yield from asked(Ask("/stop_engine", {}, ENGINE_TIMEOUT_S), SuccessReply)
    yield from until((EngineStatus.OFFLINE,), None)


def until(wanted: Collection[EngineStatus], limit_s: float | None) -> Talk[EngineStatusReply]:
    """For an engine that was on: raises SwarmServerOfflineError, with the server's reason, where it
    is off and that is not wanted; ServerUnreachable after `limit_s`."""
    patience = Patience(limit_s)
    while True:
        try:
            known = yield from status()
        except SwarmError as error:
            if not is_passing(error) or patience.is_over:
                raise
            yield from patience.pause(error.detail)
            continue
        if known.engine_status in wanted:
            return known
        if known.engine_status is EngineStatus.OFFLINE:
            raise SwarmServerOfflineError(
                known.engine_status_detail or "The engine was stopped while it was waited for."
            )
        if patience.is_over:
            raise ServerUnreachable(f"The engine is still in {known.engine_status}.")
        yield from patience.pause(f"the engine is in {known.engine_status}")


def ensure_running(job: TrainJob, force_restart: bool, limit_s: float | None) -> Talk[None]:
    """An engine with this job; one that runs already is left as it is, and what its job says
    otherwise is told. Raises SwarmError."""
    known = yield from _found()
    if force_restart:
        yield from stop()
    elif known.engine_status is not EngineStatus.OFFLINE:
        _tell_closed((yield from until(RUNNING, limit_s)))
        return (yield from _tell_differences(job))
    yield from sync_job(job)
    _tell_closed((yield from start(limit_s)))


def _found() -> Talk[EngineStatusReply]:
    try:
        return (yield from status_from(Patience(FIND_SERVER_S)))
    except ServerUnreachable as error:
        raise ServerUnreachable(
            f"{error.detail}. Start a server with `fakevllm-server start`, or mend the URL."
        ) from None


def _tell_closed(known: EngineStatusReply) -> None:
    if known.closed is not None:
        log.warning("%s", describe_closed_run(known.closed))


def _tell_differences(job: TrainJob) -> Talk[None]:
    answer = yield from answered(Ask("/get_train_config", timeout_s=QUICK_TIMEOUT_S))
    differences = differing(job, answer)
    if differences:
        log.warning(
            "the engine runs with another job, which stays: %s. To go on with this one: "
            "force_restart=True",
            "; ".join(differences),
        )


def differing(job: TrainJob, answer: Answer) -> list[str]:
    """Setting by setting, what this client asks for and the server does otherwise; of settings that
    the client left alone nothing is told."""
    running = answer.content
    if answer.status != 200 or not isinstance(running, dict):
        return []
    wanted = job.model_dump(mode="json", exclude_unset=True)
    return [
        f"{name} is {running[name]!r}, not {value!r}"
        for name, value in wanted.items()
        if name in running and running[name] != value
    ]
