"""Requests for stored responses and the replies to these requests. A request reads (GET), deletes
(DELETE) or cancels a stored response. This module does no I/O."""

from __future__ import annotations

from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.protocol.errors import bad_request, schema_error


class _Query(BaseModel):
    starting_after: int | None = None
    stream: bool | None = False


def check_query(query: bytes) -> None:
    """Check the query of a GET request as vLLM does. Raises WireError (400) for a value of a wrong
    type."""
    _parse(query)


def refuse_stream(query: bytes, response_id: str) -> None:
    """Raise WireError (400) if a GET request asks for a stored response as a stream of events.

    Only vLLM's background responses have stored events. `query` is the query string of the GET
    request. It must have passed `check_query`.
    """
    if _parse(query).stream:
        raise bad_request(f"Unknown response_id: {response_id}", "response_id", response_id)


def deletion(response_id: str) -> Json:
    """Return the answer to a DELETE request, in the form of OpenAI's API. vLLM has no such
    route."""
    return {"id": response_id, "object": "response", "deleted": True}


def _parse(query: bytes) -> _Query:
    values = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    try:
        return _Query.model_validate(values)
    except ValidationError as error:
        problems = [dict(problem) for problem in error.errors(include_url=False)]
        raise schema_error(problems, place="query") from None
