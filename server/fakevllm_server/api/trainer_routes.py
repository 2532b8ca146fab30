"""Routes that AgentJet's own trainer calls on its server, refused in the protocol's shape: here the
trainer is the server's child, and nobody else says what state the engine is in or what is trained.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter

from fakevllm_adapters.protocol.swarm import SuccessReply
from fakevllm_server.swarm import Swarm

TRAINER_PATHS = (
    "/register_episode",
    "/is_episode_claimed",
    "/update_engine_status",
    "/update_current_batch_rollout_pool_information",
    "/update_current_batch_rollout_pool_information_and_fetch_instruction",
)


def router(_: Swarm) -> APIRouter:
    routes = APIRouter()
    for path in TRAINER_PATHS:
        routes.add_api_route(path, _refusal(path), methods=["POST"], name=path[1:])
    return routes


def _refusal(path: str) -> Callable[[], Awaitable[SuccessReply]]:
    async def refuse() -> SuccessReply:
        return SuccessReply(
            success=False,
            failure_reason=f"{path} is for a trainer, and this server has its own. Clients have "
            "/claim_episode, /get_engine_status and "
            "/get_current_batch_rollout_pool_information.",
        )

    return refuse
