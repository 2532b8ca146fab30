"""Groups of passive traffic: all rewards at once, or none; and what was said of an answer later."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

from fakevllm_adapters.swarm import (
    AbortGroupRequest,
    AddSampleRequest,
    EndGroupReply,
    EndGroupRequest,
    SuccessReply,
)
from fakevllm_server.api.refusals import ClearRoute
from fakevllm_server.calls import RecordedCall
from fakevllm_server.swarm import Swarm


def router(swarm: Swarm) -> APIRouter:
    routes = APIRouter(route_class=ClearRoute)

    def acknowledge(name: str, reply: EndGroupReply) -> None:
        if reply.pooled:
            swarm.runlog.acked(name, swarm.engine.global_step)
            swarm.changed()

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
        if not known:
            acknowledge(request.group_id, reply)
        return reply.model_copy(update={"run_id": swarm.run_id})

    @routes.post("/add_sample")
    async def add_sample(request: AddSampleRequest) -> EndGroupReply:
        if request.run_id != swarm.run_id:
            return EndGroupReply(success=False, failure_reason="other_run")
        try:
            calls = [RecordedCall.of_wire(call) for call in request.calls]
        except ValueError as error:
            raise HTTPException(422, f"A call cannot be trained: {error}.") from None
        if not swarm.engine.is_serving:
            # What earlier lives trained is known, and a pool there, once the engine is up.
            status = swarm.engine.status
            raise HTTPException(503, f"No samples are taken: the engine is {status}. Try later.")
        known = swarm.pool.has_ended(request.sample_id)
        reply = swarm.pool.add_sample(
            request.sample_id,
            calls,
            request.advantage,
            swarm.engine.collecting_step,
            closed=swarm.closed,
        )
        if not known:
            acknowledge(request.sample_id, reply)
        return reply

    @routes.post("/abort_group")
    async def abort_group(request: AbortGroupRequest) -> SuccessReply:
        swarm.pool.abort_group(request.group_id)
        return SuccessReply(success=True)

    return routes
