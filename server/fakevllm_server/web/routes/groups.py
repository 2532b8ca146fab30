"""Routes for passive groups, for feedback samples, for users' edits and for logged groups.

A passive group consists of the answers to one request of an app. The answers are called siblings.
The proxy ends a group with one request that has the rewards of all siblings. Alternatively, the
proxy aborts the group.

A feedback sample is an answer that is trained again because of later feedback from a user. A logged
group is a group of an earlier run that `fakevllm retrain` reads from a ledger.
"""

from __future__ import annotations

import logging
from itertools import chain

from fastapi import APIRouter, HTTPException, Request, Response

from fakevllm_adapters.protocol.errors import unavailable
from fakevllm_adapters.protocol.forgetting import ForgetGroupsReply, ForgetGroupsRequest
from fakevllm_adapters.protocol.separate_prompts import ASKED, PROMPTS_HEADER, sizes_header
from fakevllm_adapters.protocol.swarm import (
    AbortGroupRequest,
    AddDemonstrationRequest,
    AddLoggedGroupReply,
    AddLoggedGroupRequest,
    AddSampleRequest,
    EndGroupReply,
    EndGroupRequest,
    SuccessReply,
)
from fakevllm_server.training.forget_service import ForgettingPending
from fakevllm_server.training.vocabulary_check import check_ids
from fakevllm_server.types.backend import BackendError
from fakevllm_server.types.calls import RecordedCall
from fakevllm_server.types.edit_demonstrations import parse_demonstrations
from fakevllm_server.web.routes.refusals import DirectRoute, StrictRoute
from fakevllm_server.web.server_state import ServerState

log = logging.getLogger("fakevllm.server")


def router(state: ServerState) -> APIRouter:
    """Return the routes for passive groups, for feedback samples and for logged groups. A passive
    group consists of the answers to one request of an app."""
    routes = APIRouter(route_class=StrictRoute)

    async def end_group(body: EndGroupRequest, http: Request) -> Response:
        """End the group of a proxy, with the rewards of all its siblings."""
        run_id = state.run_id  # another run may be started before the reply is complete
        reply = await state.intake.end_group(body, state.closed_reason)
        state.notify_loop()
        if reply.success:  # a refused group may be of another run, whose id the proxy must keep
            reply = reply.model_copy(update={"run_id": run_id})
        has_prompts_apart = http.headers.get(PROMPTS_HEADER) == ASKED
        return _group_response(reply, has_prompts_apart=has_prompts_apart)

    routes.add_api_route(
        "/end_group",
        end_group,
        methods=["POST"],
        response_model=EndGroupReply,
        route_class_override=DirectRoute,
    )

    @routes.post("/add_sample")
    async def add_sample(request: AddSampleRequest) -> EndGroupReply:
        """Train one answer of an ended group again, because of a user's feedback. The
        request contains the calls of the answer, and its advantage."""
        if request.run_id != state.run_id:
            return EndGroupReply(success=False, failure_reason="other_run")
        try:
            calls = [RecordedCall.from_wire(call) for call in request.calls]
            check_ids(calls, state.vocab_size)
        except ValueError as error:
            raise HTTPException(422, f"A call cannot be trained: {error}.") from None
        reply = await state.intake.add_sample(request, calls, state.closed_reason)
        state.notify_loop()
        return reply

    @routes.post("/add_demonstration")
    async def add_demonstration(request: AddDemonstrationRequest) -> EndGroupReply:
        """Train a user's edit of an answer as a demonstration. The request contains the edit's
        token ids."""
        if request.run_id != state.run_id:
            return EndGroupReply(success=False, failure_reason="other_run")
        try:
            loss, calls = parse_demonstrations(request)
            check_ids(calls, state.vocab_size)
        except ValueError as error:
            raise HTTPException(422, f"The demonstrations cannot be trained: {error}.") from None
        reply = await state.intake.add_demonstration(request, loss, calls, state.closed_reason)
        state.notify_loop()
        return reply

    @routes.post("/add_logged_group")
    async def add_logged_group(request: AddLoggedGroupRequest) -> AddLoggedGroupReply:
        """Train a group of an earlier run with new rewards. The request contains its calls."""
        try:
            calls = [[RecordedCall.from_log(call) for call in own] for own in request.calls]
            check_ids(chain.from_iterable(calls), state.vocab_size)
        except ValueError as error:
            raise HTTPException(422, f"A call cannot be trained: {error}.") from None
        reply = await state.intake.add_logged_group(request, calls, state.closed_reason)
        state.notify_loop()
        return reply

    @routes.post("/abort_group")
    async def abort_group(request: AbortGroupRequest) -> SuccessReply:
        """Abort the group of a proxy."""
        await state.intake.abort_group(request.group_id)
        return SuccessReply(success=True)

    @routes.post("/forget_groups")
    async def forget_groups(request: ForgetGroupsRequest) -> ForgetGroupsReply:
        """Delete the captured calls of groups. Groups that wait to be trained are dropped."""
        try:
            return await state.forget(request)
        except ForgettingPending:
            raise unavailable(
                "The groups are in a training step that has not ended: send the same request again."
            ) from None
        except BackendError as failure:
            log.error("groups could not be forgotten: %s", failure)
            raise unavailable("The engine failed: send the same request again.") from None

    return routes


def _group_response(reply: EndGroupReply, *, has_prompts_apart: bool) -> Response:
    """Return the response to the end of a group. With `has_prompts_apart`, the prompts of all calls
    precede the JSON. Otherwise each call in the JSON contains its own prompt."""
    prompts = reply.prompts if has_prompts_apart else []
    if not prompts:
        reply = reply.with_prompts_per_call()
    headers = {PROMPTS_HEADER: sizes_header(prompts)} if prompts else {}
    body = b"".join([*prompts, reply.model_dump_json().encode()])
    return Response(body, headers=headers, media_type="application/json")
