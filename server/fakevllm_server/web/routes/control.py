"""Routes that control the engine: status, job, start, stop, episode claims, and run log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.job.model import TrainJob, parse_job
from fakevllm_adapters.job.validation import check_job
from fakevllm_adapters.protocol.errors import unavailable
from fakevllm_adapters.protocol.releases import (
    ReleaseReply,
    ReleaseRequest,
    ReleasesReply,
    RollbackRequest,
    TrainingLimitRequest,
)
from fakevllm_adapters.protocol.swarm import (
    CLIENT_HEADER,
    EngineStatus,
    EngineStatusReply,
    LoadPolicyReply,
    LoadPolicyRequest,
    LogReply,
    ReplicaStatus,
    SuccessReply,
    SyncTrainConfigRequest,
)
from fakevllm_adapters.protocol.weights import WeightsReply
from fakevllm_server.config.job_warnings import job_warnings
from fakevllm_server.config.model import ConfigError
from fakevllm_server.fleet.replica import ReplicaFigures
from fakevllm_server.journal import reads
from fakevllm_server.run.trained_token_share import run_totals
from fakevllm_server.training.policies import PolicyRefused
from fakevllm_server.training.release_service import DecisionPending
from fakevllm_server.types.backend import ActionFailed, BackendError, BackendRefused
from fakevllm_server.web.routes.authorization import caller_of
from fakevllm_server.web.routes.refusals import StrictRoute
from fakevllm_server.web.server_state import ServerState

log = logging.getLogger("fakevllm.server")

UNLOAD_WITHIN_S = 5.0
"""Maximum seconds for which the reply to a decision waits until the rejected versions are unloaded
from the engine. Unloading takes longer only while another version is being loaded."""


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
    claims, and the run log."""
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
            replicas=[_replica(each) for each in state.fleet.figures] if state.fleet else [],
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

    @routes.post("/load_policy")
    async def load_policy(request: LoadPolicyRequest) -> LoadPolicyReply:
        """Hold the weights of an earlier version beside the served ones, so that calls can be
        sampled with them. The reply has the model name for these calls."""
        client, loader = state.serving_engine(), state.policies
        assert loader is not None, "an engine that serves has a loader"
        try:
            model = await loader.load(request.version, client.endpoint, pinned=request.pinned)
        except (PolicyRefused, BackendRefused, ActionFailed) as refused:
            is_temporary = isinstance(refused, PolicyRefused) and refused.is_temporary
            return LoadPolicyReply(
                success=False, failure_reason=str(refused), is_temporary=is_temporary
            )
        except BackendError as failure:
            log.error("version %d could not be loaded: %s", request.version, failure)
            raise unavailable(f"Version {request.version} could not be loaded.") from None
        return LoadPolicyReply(success=True, model=model)

    @routes.post("/unload_policy")
    async def unload_policy(request: LoadPolicyRequest) -> SuccessReply:
        """Release the weights of a version that is held beside the served ones."""
        state.serving_engine()
        assert state.policies is not None, "an engine that serves has a loader"
        try:
            await state.policies.unload(request.version, pinned=request.pinned)
        except BackendError as failure:
            return SuccessReply(success=False, failure_reason=str(failure))
        return SuccessReply(success=True)

    @routes.get("/releases")
    async def get_releases() -> ReleasesReply:
        """Return the history of releases, and the versions that follow from it."""
        saved = state.release_service.versions_with_weights()
        releases = state.run.releases.reply()
        releases = releases.model_copy(update={"run_id": state.run_id, "with_weights": saved})
        await state.journal.wait_written(state.journal.put())
        return releases

    @routes.post("/release")
    async def release(request: ReleaseRequest, http: Request) -> ReleaseReply:
        """Record a decision about a version of the weights."""
        async with _decision(state):
            return await state.release_service.decide(request, caller_of(state, http.scope))

    @routes.post("/rollback")
    async def roll_back(request: RollbackRequest, http: Request) -> ReleaseReply:
        """Let training go back to a version, and reject all versions that descend from it."""
        async with _decision(state):
            return await state.release_service.roll_back(request, caller_of(state, http.scope))

    @routes.post("/training_limit")
    async def limit_training(request: TrainingLimitRequest) -> SuccessReply:
        """Set the newest version that training may make, or remove this limit. A training step that
        is already running is completed even if it exceeds the limit."""
        reply = await state.release_service.limit_training(request)
        state.notify_loop()
        return reply

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

    @routes.get("/get_weights")
    async def get_weights(version: int) -> WeightsReply:
        """Return the digest of a version's weights. The version must belong to the current run. If
        training has restored an earlier version under a new number, both versions have the same
        digest."""
        copies = state.run.releases.lineage().copies_of(version)
        known = state.journal.read(reads.checkpoints) + state.journal.read(reads.side_checkpoints)
        saved = next((one for one in known if one.version in copies), None)
        return WeightsReply(
            run_id=state.run_id,
            version=version,
            engine=state.config.rollout_name,
            digest=None if saved is None else saved.digest,
            checkpoint_step=None if saved is None else saved.step,
        )

    @routes.get("/get_run_log")
    async def get_run_log(after: int = 0) -> LogReply:
        """Return the entries of the run log after the entry `after`. They say which groups were
        trained, dropped or lost."""
        return LogReply(entries=state.runlog.entries_after(after))

    return routes


@asynccontextmanager
async def _decision(state: ServerState) -> AsyncGenerator[None]:
    """Run a `with` block that releases, rejects or rolls back versions of the weights. If the block
    rejects versions, unload these versions from the engine.

    Raises WireError (503) if the decision has to wait, or if an engine failed. The client may then
    send the same request again, because a decision takes effect only once.
    """
    before = set(state.run.releases.state.rejected)
    try:
        yield
    except DecisionPending:
        raise unavailable(
            "The decision waits until the engine is ready or the training step has ended: send the "
            "same request again."
        ) from None
    except BackendError as failure:
        log.error("a decision about a version failed: %s", failure)
        raise unavailable("The engine failed: send the same request again.") from None
    await _unload_rejected(state, before)


async def _unload_rejected(state: ServerState, before: Collection[int]) -> None:
    """Unload the versions that were rejected since `before` from the engine. Calls to rejected
    versions are refused in any case. Therefore a version that cannot be unloaded only costs memory.
    """
    client, loader = state.engine_client, state.policies
    if client is None or loader is None or not client.endpoint.holds_policies:
        return
    with contextlib.suppress(BackendError, TimeoutError):
        async with asyncio.timeout(UNLOAD_WITHIN_S):
            for version in state.run.releases.state.rejected.difference(before):
                await loader.unload(version, pinned=True)


def _refuse_running(state: ServerState) -> None:
    """Raise HTTPException (400) unless the engine is offline. A running engine keeps its job, so no
    other job can be set."""
    if state.engine.status is not EngineStatus.OFFLINE:
        raise HTTPException(
            400,
            "Engine is already started. Call `stop_engine` first before syncing new training "
            "configuration.",
        )
