"""What can be looked at: claimed episodes, the latest call, what was said to all, where it lies."""

from __future__ import annotations

import time

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel, Field

from fakevllm_adapters.protocol.pool import EpisodeBuffer, EpisodeStatus, ExperimentDirReply
from fakevllm_adapters.protocol.swarm import SuccessReply
from fakevllm_server.api.access import caller_of, is_admin
from fakevllm_server.api.refusals import ClearRoute
from fakevllm_server.episodes import Episode
from fakevllm_server.latest_call import LatestCall
from fakevllm_server.swarm import Swarm
from fakevllm_server.verbose_log import MAX_CHARS, VerboseEntry, VerboseLog

MASKED = "***"
"""In place of a key. Nobody needs the key of a claim but who made it, and he was told it then."""


class VerboseRequest(BaseModel):
    tag: str = Field(default="", max_length=200)
    message: str = Field(default="", max_length=MAX_CHARS)


class VerboseReply(BaseModel):
    entries: list[VerboseEntry]


def router(swarm: Swarm, latest_call: LatestCall) -> APIRouter:
    routes = APIRouter(route_class=ClearRoute)
    verbose = VerboseLog()

    @routes.post("/get_episode_buffer")
    async def get_episode_buffer(request: Request) -> EpisodeBuffer:
        """One's own; an admin sees all."""
        caller, sees_all = caller_of(swarm, request.scope), is_admin(swarm, request.scope)
        shown = [one for one in swarm.episodes.claimed if sees_all or one.owner == caller]
        return EpisodeBuffer(buffer=[_status(one, str(request.base_url)) for one in shown])

    @routes.post("/replay_latest_llm_call")
    async def replay_latest_llm_call() -> Response:
        found = latest_call.as_json()
        if found is None:
            raise HTTPException(404, "No LLM call has been made yet")
        return Response(found, media_type="application/json")

    @routes.post("/push_verbose_log")
    async def push_verbose_log(request: VerboseRequest) -> SuccessReply:
        verbose.push(request.tag, request.message, time.time())
        return SuccessReply(success=True)

    @routes.get("/get_verbose_logs")
    async def get_verbose_logs() -> VerboseReply:
        return VerboseReply(entries=verbose.entries(time.time()))

    @routes.get("/get_server_experiment_dir")
    async def get_server_experiment_dir() -> ExperimentDirReply:
        return ExperimentDirReply(server_experiment_dir=str(swarm.config.run_dir.resolve()))

    return routes


def _status(episode: Episode, base_url: str) -> EpisodeStatus:
    idle_s = time.monotonic() - episode.last_activity
    return EpisodeStatus(
        episode_uuid=episode.uuid,
        episode_status="claimed",
        episode_type=episode.kind,
        openai_base_url=f"{base_url}e/{episode.uuid}/v1",
        openai_api_key=MASKED,
        client_uuid=episode.client_uuid,
        latest_activity_timestamp=time.time() - idle_s,
        discard_episode_timeout=episode.idle_limit_s,
        llm_call_count=len(episode.calls) + episode.in_flight,
        optional_task_id=episode.task_id,
    )
