"""Engine control: status, job, start, stop, and the run's log."""

from __future__ import annotations

import logging
import os

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel

from fakevllm_adapters.formats.base import Engine
from fakevllm_adapters.job.model import TrainJob, read_job
from fakevllm_adapters.job.rules import checked
from fakevllm_adapters.protocol.swarm import (
    EngineStatus,
    EngineStatusReply,
    LogReply,
    SuccessReply,
    SyncTrainConfigRequest,
)
from fakevllm_server.config.job_warnings import warnings_of
from fakevllm_server.config.model import ConfigError
from fakevllm_server.run.coverage import of_run
from fakevllm_server.web.routes.refusals import ClearRoute
from fakevllm_server.web.state import Swarm

log = logging.getLogger("fakevllm.server")


class StartReply(BaseModel):
    success: bool
    pid: int | None = None
    error: str = ""


class SyncReply(BaseModel):
    success: bool
    error: str = ""
    warnings: list[str] = []
    """What the job asks for and is not done, a line each."""


def router(swarm: Swarm) -> APIRouter:
    routes = APIRouter(route_class=ClearRoute)

    @routes.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/get_engine_status")
    async def get_engine_status() -> EngineStatusReply:
        facts = swarm.upstream.facts if swarm.upstream is not None else Engine()
        return EngineStatusReply(
            engine_status=swarm.engine.status,
            engine_status_detail=swarm.detail,
            global_step=swarm.engine.global_step,
            server_id=swarm.server_id,
            run_id=swarm.run_id,
            weight_version=swarm.engine.version,
            backlog=swarm.backlog,
            closed=swarm.closed,
            claims_paused=swarm.participation.is_paused,
            lockstep=swarm.job is not None and swarm.job.lockstep,
            totals=of_run(swarm.runlog.totals),
            dropped=swarm.runlog.drops,
            waiting=swarm.pool.waiting,
            model=facts.model,
            max_model_len=facts.max_model_len,
            engine_version=facts.version,
        )

    @routes.post("/sync_train_config")
    async def sync_train_config(request: SyncTrainConfigRequest) -> SyncReply:
        if swarm.engine.status is not EngineStatus.OFFLINE:
            raise HTTPException(
                400,
                "Engine is already started. Call `stop_engine` first before syncing new training "
                "configuration.",
            )
        try:
            read = read_job(request.yaml_as_string)
            swarm.job = checked(read.job)  # what cannot work is told here, not in a step
        except ValueError as error:
            return SyncReply(success=False, error=str(error))
        warnings = read.warnings + warnings_of(read.job, swarm.config)
        for warning in warnings:
            log.warning("the job's %s", warning)
        return SyncReply(success=True, warnings=warnings)

    @routes.get("/get_train_config")
    async def get_train_config() -> TrainJob | None:
        return swarm.job

    @routes.post("/start_engine")
    async def start_engine() -> StartReply:
        async with swarm.changing_engine:
            if swarm.engine.status is not EngineStatus.OFFLINE:
                raise HTTPException(
                    400,
                    "Cannot start engine when engine is not offline. "
                    f"Current status: {swarm.engine.status}",
                )
            if swarm.job is None:
                return StartReply(success=False, error="No training config found")
            try:
                await swarm.start_engine()
            except ConfigError as error:
                return StartReply(success=False, error=str(error))
            return StartReply(success=True, pid=os.getpid())

    @routes.post("/stop_engine")
    async def stop_engine() -> SuccessReply:
        await swarm.stop_engine()
        return SuccessReply(success=True)

    @routes.post("/pause_claims")
    async def pause_claims() -> SuccessReply:
        """Until `resume_claims`, a stop, or a restart of the server. What is claimed goes on."""
        if swarm.engine.status is EngineStatus.OFFLINE:
            reason = "The engine is offline: nothing can be claimed."
            return SuccessReply(success=False, failure_reason=reason)
        swarm.participation.is_paused = True
        return SuccessReply(success=True)

    @routes.post("/resume_claims")
    async def resume_claims() -> SuccessReply:
        swarm.participation.is_paused = False
        return SuccessReply(success=True)

    @routes.get("/get_run_log")
    async def get_run_log(after: int = 0) -> LogReply:
        return LogReply(entries=swarm.runlog.after(after))

    return routes
