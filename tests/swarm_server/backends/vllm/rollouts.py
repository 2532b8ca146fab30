"""What tests of a rollout ask of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import aiohttp

from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.backends.vllm.stand_in import StandIn
from fakevllm_server.types.backend import Endpoint

Remote = Callable[..., AbstractAsyncContextManager[tuple[VllmRollout, StandIn]]]


async def said(endpoint: Endpoint) -> str:
    """What the engine answers, as an app is answered: through its gate."""
    connector = aiohttp.UnixConnector(str(endpoint.socket)) if endpoint.socket else None
    async with (
        aiohttp.ClientSession(endpoint.url, connector=connector) as app,
        endpoint.gate.call(),
        app.post("/v1/chat/completions", json={"messages": []}) as answer,
    ):
        return (await answer.json())["choices"][0]["message"]["content"]
