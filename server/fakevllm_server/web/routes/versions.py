"""Routes for versions of the weights: hold them for sampling, release or reject them, let training
go back to one, and limit training."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager

from fastapi import APIRouter, Request

from fakevllm_adapters.protocol.errors import unavailable
from fakevllm_adapters.protocol.releases import (
    ReleaseReply,
    ReleaseRequest,
    ReleasesReply,
    RollbackRequest,
    TrainingLimitRequest,
)
from fakevllm_adapters.protocol.swarm import LoadPolicyReply, LoadPolicyRequest, SuccessReply
from fakevllm_adapters.protocol.weights import WeightsReply
from fakevllm_server.journal import reads
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


def router(state: ServerState) -> APIRouter:
    """Return the routes for versions of the weights."""
    routes = APIRouter(route_class=StrictRoute)

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
