"""A helper that calls an engine as an app does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import aiohttp

from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.backends.vllm.simulated_vllm import SimulatedVllm
from fakevllm_server.types.backend import Endpoint

ExternalVllm = Callable[..., AbstractAsyncContextManager[tuple[VllmRollout, SimulatedVllm]]]


async def complete(endpoint: Endpoint) -> str:
    """Return the content of one answer, requested through the endpoint's gate."""
    connector = aiohttp.UnixConnector(str(endpoint.socket)) if endpoint.socket else None
    async with (
        aiohttp.ClientSession(endpoint.url, connector=connector) as app,
        endpoint.gate.call(),
        app.post("/v1/chat/completions", json={"messages": []}) as response,
    ):
        return (await response.json())["choices"][0]["message"]["content"]
