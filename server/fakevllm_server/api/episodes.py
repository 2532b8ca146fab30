"""Episodes of active clients, in the swarm protocol's words."""

from __future__ import annotations

import time

from fastapi import APIRouter, HTTPException, Request

from fakevllm_adapters.swarm import (
    CanContinueRequest,
    ClaimEpisodeReply,
    ClaimEpisodeRequest,
    EndEpisodeRequest,
    EngineStatus,
)
from fakevllm_server.api.refusals import ClearRoute
from fakevllm_server.episodes import EpisodeRefused
from fakevllm_server.swarm import Swarm

_ADVICE = {
    EngineStatus.OFFLINE: "Please start the engine first. Please use one of the client to run "
    "`client.sync_train_config() + client.start_engine()` to start the engine.",
    EngineStatus.BOOTING: "Please wait until the engine is fully booted. "
    "Try again (maybe 1 minute) later.",
    EngineStatus.WEIGHT_SYNCING: "Engine is syncing weights. Try again (maybe 1 minute) later.",
    EngineStatus.ROLLING_POST: "Engine is in post-rolling phase. Try again (maybe 1 minute) later.",
}
_NONE_FREE = "No available episodes to claim. Try again (maybe 1 minute) later."


def router(swarm: Swarm) -> APIRouter:
    routes = APIRouter(route_class=ClearRoute)

    @routes.post("/claim_episode")
    async def claim_episode(request: ClaimEpisodeRequest, http: Request) -> ClaimEpisodeReply:
        refusal = _cannot_claim(swarm, request)
        if refusal is not None:
            return ClaimEpisodeReply(
                success=False, client_uuid=request.client_uuid, fail_cause=refusal
            )
        episode = swarm.episodes.claim(
            request.client_uuid,
            request.episode_type,
            request.discard_episode_timeout,
            time.monotonic(),
        )
        return ClaimEpisodeReply(
            success=True,
            client_uuid=request.client_uuid,
            episode_uuid=episode.uuid,
            openai_base_url=f"{http.base_url}e/{episode.uuid}/v1",
            openai_api_key=episode.key,
        )

    @routes.post("/end_episode")
    async def end_episode(request: EndEpisodeRequest) -> dict[str, bool]:
        status = swarm.engine.status
        if not swarm.engine.is_serving:
            raise HTTPException(
                400,
                f"Engine is not in rolling state. Current status: [{status}]. Cannot end episode.",
            )
        reward = _scalar_reward(request)
        try:
            episode = swarm.episodes.end(request.episode_uuid, request.client_uuid)
        except EpisodeRefused as refused:
            raise HTTPException(refused.status, refused.detail) from None
        if episode is not None and episode.kind == "train":
            group_id = swarm.pool.add_episode(
                request.task_id, reward, episode.calls, trains=swarm.is_training
            )
            if group_id is not None:
                swarm.runlog.acked(group_id, swarm.engine.global_step)
        swarm.changed()
        return {"success": True}

    @routes.post("/abort_episode")
    async def abort_episode(request: EndEpisodeRequest) -> dict[str, bool]:
        swarm.episodes.abort(request.episode_uuid, request.client_uuid)
        swarm.changed()
        return {"success": True}

    @routes.post("/can_continue_episode")
    async def can_continue_episode(request: CanContinueRequest) -> dict[str, bool]:
        known = swarm.episodes.find(request.episode_uuid) is not None
        return {"can_continue": swarm.engine.is_serving and known}

    return routes


def _cannot_claim(swarm: Swarm, request: ClaimEpisodeRequest) -> str | None:
    status = swarm.engine.status
    if status is not EngineStatus.ROLLING:
        return f"Engine not ready. Current status: [{status}]. {_ADVICE[status]}"
    if request.episode_type not in ("train", "eval"):
        raise HTTPException(400, f"Unknown episode_type: {request.episode_type}")
    return None if swarm.episodes.can_claim() else _NONE_FREE


def _scalar_reward(request: EndEpisodeRequest) -> float:
    """Checked before the episode is closed, so that a wrong reward can be sent again."""
    output = request.workflow_output
    if not request.task_id or output.metadata.get("task_id") != request.task_id:
        raise HTTPException(
            400, "workflow_output.metadata['task_id'] must be there and equal task_id."
        )
    if isinstance(output.reward, list) or output.reward is None:
        raise HTTPException(
            400, f"workflow_output.reward must be one number, got {output.reward!r}."
        )
    return output.reward
