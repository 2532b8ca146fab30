"""How the swarm protocol's routes refuse a body that is not theirs."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from fakevllm_server.journal.writer import JournalTrouble
from fakevllm_server.submissions import OtherBody


class _StrictRequest(Request):
    async def json(self) -> Any:
        """What cannot be written again (NaN, half a surrogate) must not get into the run's log or
        a reply. Raises json.JSONDecodeError, of which orjson's is one."""
        return orjson.loads(await self.body())


class ClearRoute(APIRoute):
    """Strict JSON, and FastAPI's 422 without the body in it, which may be beyond writing."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(_StrictRequest(request.scope, request.receive))
            except RequestValidationError as error:
                return _refused(error.errors())

        return handled


def add_handlers(app: FastAPI) -> None:
    """What any route that acknowledges something may raise."""
    app.add_exception_handler(JournalTrouble, _unwritten)
    app.add_exception_handler(OtherBody, _other_body)


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


def _refused(problems: Sequence[Any]) -> Response:
    shown = [{key: problem[key] for key in ("type", "loc", "msg")} for problem in problems]
    body = json.dumps({"detail": shown}).encode()
    return Response(body, 422, media_type="application/json")
