"""A relay between a trainer and vLLM's weight transfer routes, which disturbs a transfer."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web
from safetensors.torch import load, save

JSON_HEADERS = {"Content-Type": "application/json"}
Disturb = Callable[[bytes], Awaitable[bytes | None]]
"""Function that returns the body to pass on in place of the given one. None passes nothing on, and
answers with an error."""


class TransferRelay:
    """Passes requests on to vLLM. The second update of each transfer is disturbed."""

    def __init__(self, vllm: Path, disturb: Disturb | None = None) -> None:
        self._vllm = vllm
        self._disturb = disturb
        self.routes: list[str] = []

    @asynccontextmanager
    async def serving(self, path: Path) -> AsyncGenerator[TransferRelay]:
        app = web.Application(client_max_size=2**30)
        app.add_routes([web.post("/{route}", self._pass_on)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.Response:
        self.routes.append(request.match_info["route"])
        body: bytes | None = await request.read()
        if self._disturb is not None and self.routes[-2:] == ["update_weights"] * 2:
            body = await self._disturb(body or b"")
        if body is None:
            return web.Response(status=502, text="the relay passed nothing on")
        connector = aiohttp.UnixConnector(str(self._vllm))
        async with (
            aiohttp.ClientSession("http://engine", connector=connector) as session,
            session.post(request.path, data=body, headers=JSON_HEADERS) as response,
        ):
            return web.Response(status=response.status, body=await response.read())


async def refuse(body: bytes) -> bytes | None:
    """The trainer gets an error, and vLLM's update stays active."""
    return None


async def corrupt(body: bytes) -> bytes | None:
    """vLLM gets one weight of a wrong shape, so vLLM's update fails.

    The weight is the only one of its layer. If vLLM had loaded a part of the layer before, it would
    load the wrong weight again at the end of the update, and would have to be started again.
    """
    request: dict[str, Any] = json.loads(body)
    weights = load(base64.b64decode(request["update_info"]["weights"]))
    name = next(name for name in sorted(weights) if name.endswith("norm.weight"))
    weights[name] = torch.zeros(3)
    request["update_info"]["weights"] = base64.b64encode(save(weights)).decode()
    return json.dumps(request).encode()
