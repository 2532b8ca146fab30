"""Routes that show the server's state: claimed episodes, the current batch, tokens of a group, the
latest call, the verbose log, and the run directory."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel, Field

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.privacy.redactor import AnswerTexts
from fakevllm_adapters.protocol.batch_status import (
    AgreeRequest,
    EpisodeBuffer,
    EpisodeStatus,
    ExperimentDirReply,
    PoolInformation,
)
from fakevllm_adapters.protocol.group_tokens import GroupView
from fakevllm_adapters.protocol.swarm import SuccessReply
from fakevllm_server.config.model import ConfigError
from fakevllm_server.episodes.batch_selection import method_of
from fakevllm_server.episodes.episode_registry import Episode
from fakevllm_server.journal.external_reader import read_journal_file
from fakevllm_server.journal.rows import CorruptCall
from fakevllm_server.run.group_display import read_group_view
from fakevllm_server.web.latest_call_recorder import LatestCall
from fakevllm_server.web.pool_view import pool_information
from fakevllm_server.web.routes.authorization import caller_of, is_admin
from fakevllm_server.web.routes.refusals import StrictRoute
from fakevllm_server.web.server_state import ServerState
from fakevllm_server.web.verbose_log import MAX_CHARS, VerboseEntry, VerboseLog

MASKED = "***"
"""Text that replaces an episode's key. Only the client that claimed the episode needs the key, and
this client got the key in the reply to the claim."""

_LATEST_CALL_REDACTED = "The latest LLM call has text that is redacted."
_LATEST_CALL_NOT_KEPT = (
    "The server does not keep the latest call: start it with --keep-latest-call to inspect calls."
)


class VerboseRequest(BaseModel):
    tag: str = Field(default="", max_length=200)
    message: str = Field(default="", max_length=MAX_CHARS)


class VerboseReply(BaseModel):
    entries: list[VerboseEntry]


def router(state: ServerState, latest_call: LatestCall | None) -> APIRouter:
    """Return the routes that show the server's state. `latest_call` is None if the server does not
    keep the latest call."""
    routes = APIRouter(route_class=StrictRoute)
    for part in (_batch_routes(state), _token_routes(state), _trainer_routes()):
        routes.include_router(part)
    verbose = VerboseLog()

    @routes.post("/get_episode_buffer")
    async def get_episode_buffer(request: Request) -> EpisodeBuffer:
        """Return the caller's claimed episodes, with masked keys. An admin gets the claimed
        episodes of all clients."""
        caller, sees_all = caller_of(state, request.scope), is_admin(state, request.scope)
        episodes = [each for each in state.episodes.claimed if sees_all or each.owner == caller]
        base_url = str(request.base_url)
        return EpisodeBuffer(buffer=[_status(episode, base_url) for episode in episodes])

    @routes.post("/replay_latest_llm_call")
    async def replay_latest_llm_call() -> Response:
        """Return the latest call and its answer. Without `--keep-latest-call`, the reply has status
        404."""
        if latest_call is None:
            raise HTTPException(404, _LATEST_CALL_NOT_KEPT)
        call = latest_call.as_json()
        if call is None:
            raise HTTPException(404, "No LLM call has been made yet")
        texts = AnswerTexts()
        texts.add_answer(call)
        redacted = state.redactor.json_text(call.decode()).encode()
        if redacted != call or state.redactor.finds_any(texts.texts):
            raise HTTPException(404, _LATEST_CALL_REDACTED)
        return Response(call, media_type="application/json")

    @routes.post("/push_verbose_log")
    async def push_verbose_log(request: VerboseRequest) -> SuccessReply:
        """Show a message to all clients for 30 seconds."""
        tag, message = map(state.redactor.text, (request.tag, request.message))
        verbose.push(tag, message, now=time.monotonic(), unix_now=time.time())
        return SuccessReply(success=True)

    @routes.get("/get_verbose_logs")
    async def get_verbose_logs() -> VerboseReply:
        """Return the messages of clients."""
        return VerboseReply(entries=verbose.entries(time.monotonic()))

    @routes.get("/get_server_experiment_dir")
    async def get_server_experiment_dir() -> ExperimentDirReply:
        """Return the path of the current run's folder."""
        return ExperimentDirReply(server_experiment_dir=str(state.run.path.resolve()))

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


def _batch_routes(state: ServerState) -> APIRouter:
    """Return two routes about the batch that is being collected. The first route shows the batch.
    By the second route, a client agrees to train on the batch."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.get("/get_current_batch_rollout_pool_information")
    async def get_current_batch_rollout_pool_information() -> PoolInformation:
        """Return the batch that is being collected."""
        return pool_information(state)

    @routes.post("/agree_sync_weight")
    async def agree_sync_weight(request: AgreeRequest) -> SuccessReply:
        """Record that a client agrees to the start of the next training step."""
        job = state.job or TrainJob()
        if not method_of(job).is_agreed_on:
            raise HTTPException(
                400,
                "This job's steps need no agreement: swarm_mode_sample_collection_method is "
                f"{job.swarm_mode_sample_collection_method}. Set a method that ends in "
                "agree_sync_weight.",
            )
        refusal = state.pool.clients.agree(request.client_uuid, time.monotonic())
        state.notify_loop()
        return SuccessReply(success=refusal is None, failure_reason=refusal or "")

    return routes


def _token_routes(state: ServerState) -> APIRouter:
    """Return the route from which `fakevllm tokens` reads the tokens of a group or an episode."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.get("/get_episode_tokens")
    def get_episode_tokens(episode: str) -> GroupView:
        """Return the tokens of a group or an episode.

        The reply may be large. No other request has to wait: FastAPI runs this function in a
        thread, and the function reads the journal file through a connection of its own.
        """
        try:
            view = read_journal_file(state.run.path / "journal.sqlite", read_group_view, episode)
        except CorruptCall:
            raise HTTPException(410, f"The journal's record of {episode} is damaged.") from None
        except ConfigError as error:
            raise HTTPException(503, str(error)) from None
        if view is None:
            raise HTTPException(404, f"The journal has no group or episode {episode}.")
        return view

    return routes


TRAINER_PATHS = (
    "/register_episode",
    "/is_episode_claimed",
    "/update_engine_status",
    "/update_current_batch_rollout_pool_information",
    "/update_current_batch_rollout_pool_information_and_fetch_instruction",
)


def _trainer_routes() -> APIRouter:
    """Return routes of the swarm protocol that refuse every request.

    The protocol comes from the framework AgentJet. In AgentJet, the trainer is a client, and sets
    the engine's state and the batch through these routes. This server has a trainer of its own, as
    a child process. The refusals have the protocol's format.
    """
    routes = APIRouter()
    for path in TRAINER_PATHS:
        routes.add_api_route(path, _refusal(path), methods=["POST"], name=path[1:])
    return routes


def _refusal(path: str) -> Callable[[], Awaitable[SuccessReply]]:
    async def refuse() -> SuccessReply:
        """Refuse a request for AgentJet's own trainer, because this server has its own. The reply
        is `{"success": false, "failure_reason": …}`."""
        return SuccessReply(
            success=False,
            failure_reason=f"{path} is for a trainer, and this server has its own. Clients use "
            "/claim_episode, /get_engine_status and "
            "/get_current_batch_rollout_pool_information.",
        )

    return refuse
