"""Routes for the episodes of clients that run agents: claim, renew, end, abort.

The server speaks the protocol of AgentJet, a framework for training agents. Clients that were
written for AgentJet search the server's messages for certain words. Therefore the messages contain
the same words as AgentJet's.
"""

from __future__ import annotations

import logging
import time

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel

from fakevllm_adapters.protocol.swarm import (
    CanContinueRequest,
    ClaimEpisodeReply,
    ClaimEpisodeRequest,
    EndEpisodeReply,
    EndEpisodeRequest,
    EngineStatus,
)
from fakevllm_server.episodes.collection_limit import AHEAD
from fakevllm_server.episodes.episode_registry import EpisodeRefused, Idempotency, max_claims
from fakevllm_server.episodes.submissions import hash_of
from fakevllm_server.web.routes.authorization import caller_of
from fakevllm_server.web.routes.refusals import StrictRoute
from fakevllm_server.web.server_state import ServerState

log = logging.getLogger("fakevllm.server")

_ADVICE = {
    EngineStatus.OFFLINE: "Please start the engine first. Please use one of the client to run "
    "`client.sync_train_config() + client.start_engine()` to start the engine.",
    EngineStatus.BOOTING: "Please wait until the engine is fully booted. "
    "Try again (maybe 1 minute) later.",
    EngineStatus.WEIGHT_SYNCING: "Engine is syncing weights. Try again (maybe 1 minute) later.",
    EngineStatus.ROLLING_POST: "Engine is in post-rolling phase. Try again (maybe 1 minute) later.",
}
"""Advice for a client whose claim is refused, by the engine's status."""
_LOCKSTEP = (
    "The job is in lockstep: only groups of its proxy are trained, so no episode can be claimed."
)
_NO_FREE_EPISODE = "No available episodes to claim. Try again (maybe 1 minute) later."
"""Sentence that clients search for in a message. The text after it is for people."""
_TASK_MISSING = (
    "throttle_policy.current_task_id must name the task of the episode: "
    "shares are counted in tasks."
)


class RenewReply(BaseModel):
    success: bool
    idle_limit_s: float
    """Seconds that the episode may be idle from now on."""


def router(state: ServerState) -> APIRouter:
    """Return the HTTP routes by which clients claim, renew, end and abort episodes."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.post("/claim_episode")
    async def claim_episode(request: ClaimEpisodeRequest, http: Request) -> ClaimEpisodeReply:
        """Claim an episode. The reply has the episode's base URL and API key."""
        return await _claim(state, request, http)

    @routes.post("/end_episode", response_model_exclude_defaults=True)
    async def end_episode(request: EndEpisodeRequest, http: Request) -> EndEpisodeReply:
        """End one of the caller's episodes with its reward."""
        reward = _scalar_reward(request)
        try:
            state.episodes.check_owner(request.episode_uuid, caller_of(state, http.scope))
            reply = await state.intake.end_episode(request, reward, state.closed_reason)
        except EpisodeRefused as refused:
            status = state.engine.status
            detail = refused.detail if state.engine.is_serving else _end_refusal(status)
            raise HTTPException(refused.status, detail) from None
        state.notify_loop()
        # After the end of training every episode gets the same warning; the log has it already.
        if reply.warning and state.closed_reason is None:
            log.warning("episode %s: %s", request.episode_uuid, reply.warning)
        return reply

    @routes.post("/abort_episode")
    async def abort_episode(request: EndEpisodeRequest, http: Request) -> dict[str, bool]:
        """Abort one of the caller's episodes."""
        try:
            state.episodes.check_owner(request.episode_uuid, caller_of(state, http.scope))
        except EpisodeRefused as refused:
            raise HTTPException(refused.status, refused.detail) from None
        await state.intake.abort_episode(
            request.episode_uuid, request.client_uuid, request.declare_client_active
        )
        state.notify_loop()
        return {"success": True}

    @routes.post("/renew_episode")
    async def renew_episode(request: CanContinueRequest, http: Request) -> RenewReply:
        """Reset the idle timeout of an episode whose agent makes no call for a long time.
        If the claim has expired, the reply has status 410."""
        try:
            state.episodes.check_owner(request.episode_uuid, caller_of(state, http.scope))
            episode = state.episodes.find_owned(request.episode_uuid, request.client_uuid)
        except EpisodeRefused as refused:
            raise HTTPException(410, refused.detail) from None
        now = time.monotonic()
        state.episodes.renew(episode, now)
        state.participation.clients.touch(episode.client_uuid, now)
        return RenewReply(success=True, idle_limit_s=episode.idle_limit_s)

    @routes.post("/can_continue_episode")
    async def can_continue_episode(request: CanContinueRequest, http: Request) -> dict[str, bool]:
        """Reply whether one of the caller's episodes is still claimed."""
        try:
            state.episodes.check_owner(request.episode_uuid, caller_of(state, http.scope))
        except EpisodeRefused:
            return {"can_continue": False}
        known = state.episodes.find(request.episode_uuid) is not None
        return {"can_continue": state.engine.is_serving and known}

    return routes


async def _claim(
    state: ServerState, request: ClaimEpisodeRequest, http: Request
) -> ClaimEpisodeReply:
    client, owner = request.client_uuid, caller_of(state, http.scope)
    policy, idempotency = request.throttle_policy, _idempotency_of(request)
    episode = None
    if idempotency is not None:
        episode = await state.intake.renew_claim(client, owner, idempotency, policy)
    # While the engine serves no calls, a repeated claim is treated like a new claim.
    is_repeat = episode is not None and state.engine.is_serving
    refusal = None if is_repeat else _claim_refusal(state, request)
    if refusal is not None:
        return ClaimEpisodeReply(success=False, client_uuid=client, fail_cause=refusal)
    if episode is None:
        kind, idle_limit_s = request.episode_type, request.discard_episode_timeout
        episode = await state.intake.claim(client, kind, idle_limit_s, owner, policy, idempotency)
    return ClaimEpisodeReply(
        success=True,
        client_uuid=request.client_uuid,
        episode_uuid=episode.uuid,
        openai_base_url=f"{http.base_url}e/{episode.uuid}/v1",
        openai_api_key=episode.key,
    )


def _idempotency_of(request: ClaimEpisodeRequest) -> Idempotency | None:
    key = request.idempotency_key
    return Idempotency(key, hash_of(request)) if key else None


def _claim_refusal(state: ServerState, request: ClaimEpisodeRequest) -> str | None:
    """Return the reason why the requested episode cannot be claimed now, or None if it can be
    claimed.

    Raises HTTPException (400) for a request that can never succeed.
    """
    status = state.engine.status
    if status is not EngineStatus.ROLLING:
        return f"Engine not ready. Current status: [{status}]. {_ADVICE[status]}"
    if request.episode_type not in ("train", "eval"):
        raise HTTPException(400, f"Unknown episode_type: {request.episode_type}")
    job = state.job
    if job is not None and job.lockstep and request.episode_type == "train":
        return _LOCKSTEP
    policy = request.throttle_policy if request.episode_type == "train" else None
    if policy is not None and policy.has_share and not policy.current_task_id:
        raise HTTPException(400, _TASK_MISSING)
    # First of the remaining checks, because it also records that the client is active.
    now = time.monotonic()
    participation_refusal = state.participation.refusal(request, now)
    num_slots = max_claims(job)
    if not state.episodes.can_claim(num_slots):
        return f"{_NO_FREE_EPISODE} The limit of {num_slots:,} claimed episodes is reached."
    if participation_refusal is not None:
        return f"{_NO_FREE_EPISODE} {participation_refusal}"
    # An episode of a task that is already begun adds no group.
    is_new = policy is None or not state.pool.is_begun(policy.current_task_id)
    if request.episode_type == "train" and is_new and not state.may_begin_episode(now):
        return f"{_NO_FREE_EPISODE} {AHEAD}"
    return None


def _end_refusal(status: EngineStatus) -> str:
    return f"Engine is not in rolling state. Current status: [{status}]. Cannot end episode."


def _scalar_reward(request: EndEpisodeRequest) -> float:
    """Return the reward in a request that ends an episode.

    Raises HTTPException (400) if the reward is not a single number, or if the task id is wrong. The
    reward and the task id are checked before the episode is ended. Therefore the client can send a
    corrected request.
    """
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
