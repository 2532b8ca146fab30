"""How the swarm protocol's routes refuse a body that is not theirs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from fakevllm_adapters.http.validation_messages import one_line
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.journal.writer import JournalError

_NO_OBJECT = (
    "The body must be one JSON object, sent with the header content-type: application/json."
)
_NOT_FINITE = " JSON has no NaN and no Infinity: send a finite number."


class _StrictRequest(Request):
    async def body(self) -> bytes:
        """FastAPI would tell of one that is too large that it cannot be parsed."""
        try:
            return await super().body()
        except WireError as error:
            raise HTTPException(error.status, error.body["error"]["message"]) from None

    async def json(self) -> Any:
        """What cannot be written again (NaN, half a surrogate) must not get into the run's log or
        a reply. Raises json.JSONDecodeError, of which orjson's is one."""
        return orjson.loads(await self.body())


class StrictRoute(APIRoute):
    """Strict JSON, and FastAPI's 422 in one line, without the body, which may be beyond writing."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(_StrictRequest(request.scope, request.receive))
            except RequestValidationError as error:
                return JSONResponse({"detail": _told(error)}, 422)

        return handled


def add_handlers(app: FastAPI) -> None:
    """What any route that acknowledges something may raise."""
    app.add_exception_handler(JournalError, _unwritten)
    app.add_exception_handler(IdempotencyConflict, _other_body)


def _unwritten(_: Request, error: Exception) -> Response:
    """Nothing is acknowledged that a crash could take back; sent again it counts once."""
    detail = f"It cannot be written to the journal now ({error}). Try again later."
    return JSONResponse({"detail": detail}, 503, {"Retry-After": "2"})


def _other_body(_: Request, error: Exception) -> Response:
    detail = (
        "It was acknowledged before with other contents, which stand: send again only what was "
        "sent before."
    )
    return JSONResponse({"detail": detail}, 409)


def _told(error: RequestValidationError) -> str:
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        is_not_finite = any(word in str(error.body) for word in ("NaN", "Infinity"))
        return f"The body is not JSON: {first['ctx']['error']}." + _NOT_FINITE * is_not_finite
    return _NO_OBJECT if first["loc"] == ("body",) else f"{one_line(problems)}."
