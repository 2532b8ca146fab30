"""Groups of passive traffic: all rewards at once, or none."""

from __future__ import annotations

from fastapi import APIRouter

from fakevllm_adapters.swarm import AbortGroupRequest, EndGroupReply, EndGroupRequest, SuccessReply
from fakevllm_server.api.refusals import ClearRoute
from fakevllm_server.swarm import Swarm


def router(swarm: Swarm) -> APIRouter:
    routes = APIRouter(route_class=ClearRoute)

    @routes.post("/end_group")
    async def end_group(request: EndGroupRequest) -> EndGroupReply:
        known = swarm.pool.has_ended(request.group_id)
        reply = swarm.pool.end_group(
            request.group_id,
            request.rewards,
            swarm.engine.collecting_step,
            closed=swarm.closed,
            served=request.served,
            parent_id=request.parent_id,
        )
        if reply.pooled and not known:
            swarm.runlog.acked(request.group_id, swarm.engine.global_step)
            swarm.changed()
        return reply

    @routes.post("/abort_group")
    async def abort_group(request: AbortGroupRequest) -> SuccessReply:
        swarm.pool.abort_group(request.group_id)
        return SuccessReply(success=True)

    return routes
