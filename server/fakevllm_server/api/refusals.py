"""How the swarm protocol's routes refuse a body that is not theirs."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute


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


def _refused(problems: Sequence[Any]) -> Response:
    shown = [{key: problem[key] for key in ("type", "loc", "msg")} for problem in problems]
    body = json.dumps({"detail": shown}).encode()
    return Response(body, 422, media_type="application/json")
