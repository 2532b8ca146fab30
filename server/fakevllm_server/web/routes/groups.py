"""Groups of passive traffic: all rewards at once, or none; and what was said of an answer later."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

from fakevllm_adapters.protocol.swarm import (
    AbortGroupRequest,
    AddSampleRequest,
    EndGroupReply,
    EndGroupRequest,
    SuccessReply,
)
from fakevllm_server.types.calls import RecordedCall
from fakevllm_server.web.routes.refusals import StrictRoute
from fakevllm_server.web.state import ServerState


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(route_class=StrictRoute)

    @routes.post("/end_group")
    async def end_group(request: EndGroupRequest) -> EndGroupReply:
        reply = await state.intake.end_group(request, state.closed)
        state.changed()
        return reply.model_copy(update={"run_id": state.run_id})

    @routes.post("/add_sample")
    async def add_sample(request: AddSampleRequest) -> EndGroupReply:
        if request.run_id != state.run_id:
            return EndGroupReply(success=False, failure_reason="other_run")
        try:
            calls = [RecordedCall.from_wire(call) for call in request.calls]
        except ValueError as error:
            raise HTTPException(422, f"A call cannot be trained: {error}.") from None
        reply = await state.intake.add_sample(request, calls, state.closed)
        state.changed()
        return reply

    @routes.post("/abort_group")
    async def abort_group(request: AbortGroupRequest) -> SuccessReply:
        await state.intake.abort_group(request.group_id)
        return SuccessReply(success=True)

    return routes
