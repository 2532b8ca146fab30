"""Routes that control the engine: status, job, start, stop, episode claims, and run log."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.job.model import TrainJob, parse_job
from fakevllm_adapters.job.validation import check_job
from fakevllm_adapters.protocol.swarm import (
    CLIENT_HEADER,
    EngineStatus,
    EngineStatusReply,
    LogReply,
    ReplicaStatus,
    SuccessReply,
    SyncTrainConfigRequest,
)
from fakevllm_server.config.job_warnings import job_warnings
from fakevllm_server.config.model import ConfigError
from fakevllm_server.fleet.replica import ReplicaFigures
from fakevllm_server.run.trained_token_share import run_totals
from fakevllm_server.web.routes.refusals import StrictRoute
from fakevllm_server.web.server_state import ServerState

log = logging.getLogger("fakevllm.server")


class StartReply(BaseModel):
    success: bool
    pid: int | None = None
    error: str = ""


class RunReply(BaseModel):
    """What the server tells a client about one run in its run directory."""

    folder: str
    """Path of the run's folder, relative to the run directory."""
    experiment_name: str | None
    model: str | None
    last_step: int | None
    """Last step that was trained; None if the journal cannot be read."""
    num_bytes: int
    """Size of all files of the run."""
    is_current: bool


class RunsReply(BaseModel):
    runs: list[RunReply]


class SyncReply(BaseModel):
    success: bool
    error: str = ""
    warnings: list[str] = []
    """Settings of the job that have no effect on this server, one line each."""


def _replica(figures: ReplicaFigures) -> ReplicaStatus:
    cache = figures.prefix_cache
    return ReplicaStatus(
        name=figures.name,
        state=figures.state.value,
        version=figures.version,
        running=figures.num_running,
        waiting=figures.num_waiting,
        restarts=figures.num_restarts,
        prefix_hit_share=None if cache is None else cache.share,
        cause=figures.cause,
    )


def router(state: ServerState) -> APIRouter:
    """Return the routes for the engine's status, its job, its start and stop, the pause of episode
    claims, the list of runs, and the run log."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.get("/health")
    async def health() -> JSONResponse:
        """Reply with status 200, or with 503 and the reason if no engine can be started, for
        example because the journal's disk is full."""
        if state.is_healthy:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unhealthy", "detail": state.detail}, 503)

    @routes.get("/get_engine_status")
    async def get_engine_status(http: Request) -> EngineStatusReply:
        """Return the status of the engine and of the run."""
        facts = state.engine_client.info if state.engine_client is not None else EngineInfo()
        return EngineStatusReply(
            engine_status=state.status_for(is_own_client=CLIENT_HEADER in http.headers),
            engine_status_detail=state.detail,
            global_step=state.engine.global_step,
            server_id=state.server_id,
            started_at=state.started_at,
            rollout=state.config.rollout_name,
            trainer=state.config.trainer_name,
            run_id=state.run_id,
            weight_version=state.engine.version,
            backlog=state.backlog,
            closed=state.closed_reason,
            claims_paused=state.participation.is_paused,
            lockstep=state.job is not None and state.job.lockstep,
            async_steps=0 if state.job is None else state.job.async_steps,
            async_step_runs=state.engine.async_step_runs,
            totals=run_totals(state.runlog.totals),
            dropped=state.runlog.drops,
            waiting=state.pool.waiting,
            model=facts.model,
            max_model_len=facts.max_model_len,
            engine_version=facts.version,
            replicas=[_replica(each) for each in state.replicas],
            shares_calls=True,
            released=state.run.releases.state.released,
            num_releases=state.run.releases.num_records,
            training_limit=state.run.releases.training_limit,
            privacy=state.privacy.model_dump(mode="json", exclude_defaults=True),
        )

    @routes.post("/sync_train_config")
    async def sync_train_config(request: SyncTrainConfigRequest) -> SyncReply:
        """Set the job of the next engine start."""
        _refuse_running(state)
        async with state.engine_lock:
            _refuse_running(state)  # the engine may have been started during the wait for the lock
            try:
                read = parse_job(request.yaml_as_string)
                # Impossible settings are refused here, and not in the first step.
                state.job = check_job(read.job)
            except ValueError as error:
                return SyncReply(success=False, error=str(error))
        warnings = read.warnings + job_warnings(read.job, state.config)
        for warning in warnings:
            log.warning("the job's %s", warning)
        return SyncReply(success=True, warnings=warnings)

    @routes.get("/get_train_config")
    async def get_train_config() -> TrainJob | None:
        """Return the job; null if no job was sent."""
        return state.job

    @routes.post("/start_engine")
    async def start_engine() -> StartReply:
        """Start the engine with the job."""
        async with state.engine_lock:
            if state.engine.status is not EngineStatus.OFFLINE:
                raise HTTPException(
                    400,
                    "Cannot start engine when engine is not offline. "
                    f"Current status: {state.engine.status}",
                )
            if state.job is None:
                return StartReply(success=False, error="No training config found")
            try:
                await state.start_engine()
            except ConfigError as error:
                return StartReply(success=False, error=str(error))
            return StartReply(success=True, pid=os.getpid())

    @routes.post("/stop_engine")
    async def stop_engine() -> SuccessReply:
        """Stop the engine. The current training step is completed first."""
        await state.stop_engine()
        return SuccessReply(success=True)

    @routes.post("/pause_claims")
    async def pause_claims() -> SuccessReply:
        """Refuse to give further episodes to clients until `/resume_claims` is called, the engine
        is stopped, or the server restarts. Episodes that clients have claimed already are not
        affected."""
        if state.engine.status is EngineStatus.OFFLINE:
            reason = "The engine is offline, so there are no claims to pause."
            return SuccessReply(success=False, failure_reason=reason)
        state.participation.is_paused = True
        return SuccessReply(success=True)

    @routes.post("/resume_claims")
    async def resume_claims() -> SuccessReply:
        """Give episodes to clients again."""
        state.participation.is_paused = False
        return SuccessReply(success=True)

    @routes.get("/get_runs")
    async def get_runs() -> RunsReply:
        """List the runs below the run directory, with the experiment, the model, the last step and
        the size of each run."""
        current = state.run.relative
        return RunsReply(
            runs=[
                RunReply(**asdict(run), is_current=run.folder == current)
                for run in await state.list_runs()
            ]
        )

    @routes.get("/get_run_log")
    async def get_run_log(after: int = 0) -> LogReply:
        """Return the entries of the run log after the entry `after`. They say which groups were
        trained, dropped or lost."""
        return LogReply(entries=state.runlog.entries_after(after))

    return routes


def _refuse_running(state: ServerState) -> None:
    """Raise HTTPException (400) unless the engine is offline. A running engine keeps its job, so no
    other job can be set."""
    if state.engine.status is not EngineStatus.OFFLINE:
        raise HTTPException(
            400,
            "Engine is already started. Call `stop_engine` first before syncing new training "
            "configuration.",
        )
