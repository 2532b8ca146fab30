"""POST /v1/feedback: accept a user's feedback about an answer. The request names the answer by its
id."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from fakevllm.settlement.feedback_to_reward import FeedbackBody
from fakevllm.web.proxy_components import ProxyComponents
from fakevllm.web.routes.passthrough import error_response
from fakevllm_adapters.http.asgi import ClientDisconnected, header_map, read_body
from fakevllm_adapters.http.json_body import parse_object
from fakevllm_adapters.protocol.credentials import api_key_of
from fakevllm_adapters.protocol.errors import WireError, error_body, schema_error
from fakevllm_adapters.protocol.keys import fingerprint


class FeedbackReply(BaseModel):
    """Reply with the stored feedback and its state. If the client has sent the same feedback
    before, `is_repeated` is True, and all other fields describe the earlier feedback."""

    object: str = "feedback"
    id: str
    """Id of the answer, as the client sent it."""
    feedback_id: str
    group_id: str
    state: str
    reason: str | None
    edit_state: str | None
    """State of the edit, which is trained apart from the value. None if the feedback has no edit,
    or if edits are not trained."""
    edit_reason: str | None
    is_repeated: bool
    """Whether the same feedback was stored before this request. The request has then changed
    nothing."""


def router(proxy: ProxyComponents) -> APIRouter:
    """Return the route POST /v1/feedback."""
    routes = APIRouter()
    keys = proxy.config.keys()

    @routes.post("/v1/feedback", response_model=FeedbackReply)
    async def feedback(request: Request) -> FeedbackReply | Response:
        """Store feedback on an answer. With `any_key`, an admin may send feedback on the answers of
        other API keys."""
        key = api_key_of(header_map(request.scope))
        try:
            body = _parse_feedback(await read_body(request.receive, proxy.config.limits.body_bytes))
            if body.any_key and not keys.is_admin(key):
                raise _not_admin()
            row, is_repeated = await proxy.feedback.accept(body, fingerprint(key) if key else None)
        except WireError as error:
            return error_response(error)
        except ClientDisconnected:
            return Response()  # the client has disconnected
        return FeedbackReply(
            id=body.id,
            feedback_id=row.feedback_id,
            group_id=row.group_id,
            state=row.state,
            reason=row.reason,
            edit_state=row.edit_state,
            edit_reason=row.edit_reason,
            is_repeated=is_repeated,
        )

    return routes


def _not_admin() -> WireError:
    message = "Only the key of an admin may set `any_key`: send the key that received the answer."
    return WireError(403, error_body(message, "PermissionDeniedError", 403, "any_key"))


def _parse_feedback(raw: bytes) -> FeedbackBody:
    """Parse a request body. Raises WireError (400) if the body is not valid."""
    try:
        return FeedbackBody.model_validate(parse_object(raw))
    except ValidationError as error:
        raise schema_error([dict(problem) for problem in error.errors(include_url=False)]) from None
