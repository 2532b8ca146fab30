"""Error responses of the server's routes for clients. They are for invalid bodies, an engine that
does not serve, journal failures, and reused idempotency keys."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, get_type_hints

import orjson
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from fakevllm_adapters.http.validation_messages import one_line
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.journal.group_commit_writer import JournalError

_NOT_AN_OBJECT = (
    "The body must be one JSON object, sent with the header content-type: application/json."
)
_NOT_FINITE = " JSON has no NaN and no Infinity: send a finite number."


class _StrictRequest(Request):
    """A request whose body must not be too large and must be strict JSON."""

    async def body(self) -> bytes:
        """Return the request body. Raises HTTPException (413) if the body is too large. Without
        this exception, FastAPI would answer that the body cannot be parsed."""
        try:
            return await super().body()
        except WireError as error:
            raise HTTPException(error.status, error.body["error"]["message"]) from None

    async def json(self) -> Any:
        """Return the parsed body. A body with values that cannot be written as JSON (NaN, a lone
        surrogate) is refused, because such values would break the run log or a reply.

        Raises orjson.JSONDecodeError for a refused body. FastAPI handles this error, because it is
        a subclass of json.JSONDecodeError.
        """
        return orjson.loads(await self.body())


class StrictRoute(APIRoute):
    """A route that accepts only strict JSON. It answers an invalid body with status 422 and a
    message of one line. FastAPI's own response would repeat the invalid body, and some invalid
    bodies cannot be written as JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            try:
                return await handle(_StrictRequest(request.scope, request.receive))
            except RequestValidationError as error:
                return JSONResponse({"detail": _validation_message(error)}, 422)

        return handle_strictly


class DirectRoute(StrictRoute):
    """A route that parses the body of a valid request, and calls the route's function directly.
    FastAPI's general code for parameters would double the time of a request that ends a group. All
    other requests are passed on to FastAPI, which returns the error responses.

    The route's function takes two arguments, the parsed body (named `body`) and the HTTP request.
    The function returns a Response.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model: type[BaseModel] = get_type_hints(self.endpoint)["body"]

        async def handle_directly(request: Request) -> Response:
            if request.headers.get("content-type") != "application/json":
                return await handle(request)
            try:
                raw = await _StrictRequest(request.scope, request.receive).body()
            except ClientDisconnect:
                return Response(status_code=400)  # the client has disconnected
            try:
                body = model.model_validate(orjson.loads(raw))
            except ValueError:
                return await handle(Request(request.scope, partial(_receive_again, raw)))
            return await self.endpoint(body, request)

        return handle_directly


async def _receive_again(body: bytes) -> dict[str, Any]:
    return {"type": "http.request", "body": body}


def add_handlers(app: FastAPI) -> None:
    """Register the functions that turn three exceptions into error responses. Every route that
    writes to the journal may raise JournalError and IdempotencyConflict. Routes that need the
    engine may raise WireError."""
    app.add_exception_handler(WireError, _refused)
    app.add_exception_handler(JournalError, _journal_unavailable)
    app.add_exception_handler(IdempotencyConflict, _conflict)


def _refused(_: Request, error: Exception) -> Response:
    """Return the response to a refused request. An example is a request that needs an engine while
    no engine serves."""
    assert isinstance(error, WireError)
    seconds = error.retry_after_s
    headers = None if seconds is None else {"Retry-After": str(seconds)}
    return JSONResponse({"detail": error.message}, error.status, headers)


def _journal_unavailable(_: Request, error: Exception) -> Response:
    """Return a 503 for a request that could not be written to the journal. A crash could lose the
    request, so the request is not acknowledged. The client may send the request again, and it
    counts only once."""
    detail = f"The request cannot be written to the journal now ({error}). Try again later."
    return JSONResponse({"detail": detail}, 503, {"Retry-After": "2"})


def _conflict(_: Request, error: Exception) -> Response:
    detail = (
        "The same id or key was acknowledged before with other contents, which stay valid: when "
        "you retry a request, send the same body again."
    )
    return JSONResponse({"detail": detail}, 409)


def _validation_message(error: RequestValidationError) -> str:
    """Return a message of one line that names the first invalid part of the body."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        is_not_finite = any(word in str(error.body) for word in ("NaN", "Infinity"))
        return f"The body is not JSON: {first['ctx']['error']}." + _NOT_FINITE * is_not_finite
    return _NOT_AN_OBJECT if first["loc"] == ("body",) else f"{one_line(problems)}."
