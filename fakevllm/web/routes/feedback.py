"""POST /v1/feedback: what somebody thought of an answer, by its id."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from fakevllm.settlement.feedback_values import FeedbackBody
from fakevllm.web.components import ProxyComponents
from fakevllm.web.routes.passthrough import error_response
from fakevllm_adapters.http.asgi import ClientDisconnected, header_map, read_body
from fakevllm_adapters.http.json_body import parse_object
from fakevllm_adapters.protocol.credentials import api_key_of
from fakevllm_adapters.protocol.errors import WireError, schema_error
from fakevllm_adapters.protocol.keys import fingerprint


class FeedbackReply(BaseModel):
    """Its place in the ledger, before or after it was heard."""

    object: str = "feedback"
    id: str
    """As it was named."""
    feedback_id: str
    group_id: str
    state: str
    reason: str | None
    is_repeated: bool
    """The same was sent before; nothing has changed."""


def router(proxy: ProxyComponents) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/feedback", response_model=FeedbackReply)
    async def feedback(request: Request) -> FeedbackReply | Response:
        key = api_key_of(header_map(request.scope))
        try:
            said = _parse_feedback(await read_body(request.receive, proxy.config.limits.body_bytes))
            row, is_repeated = await proxy.feedback.accept(said, fingerprint(key) if key else None)
        except WireError as error:
            return error_response(error)
        except ClientDisconnected:
            return Response()  # to nobody
        return FeedbackReply(
            id=said.id,
            feedback_id=row.feedback_id,
            group_id=row.group_id,
            state=row.state,
            reason=row.reason,
            is_repeated=is_repeated,
        )

    return routes


def _parse_feedback(raw: bytes) -> FeedbackBody:
    """Raises WireError (400)."""
    try:
        return FeedbackBody.model_validate(parse_object(raw))
    except ValidationError as error:
        raise schema_error([dict(problem) for problem in error.errors(include_url=False)]) from None
