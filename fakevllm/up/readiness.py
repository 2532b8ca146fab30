"""Waits until server and proxy answer apps, or until the engine cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping

import aiohttp
from pydantic import ValidationError

from fakevllm.errors import FakevllmError, UserError
from fakevllm.up.programs import Urls
from fakevllm.up.settings import KEY_VARIABLE, UpSettings
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply

POLL_EVERY_S = 0.25
POLL_TIMEOUT_S = 5.0


async def wait_until_ready(settings: UpSettings, urls: Urls) -> None:
    """Wait until the proxy says that the engine answers.

    Raises FakevllmError at the timeout. Raises UserError as soon as the server reports that the
    engine did not start. (Another start would fail in the same way.)
    """
    timeout_s = settings.server.ready_timeout_s
    key = settings.config.swarm.key or os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with asyncio.timeout(timeout_s), _session() as http:
            while not await _is_healthy(http, urls["proxy"]):
                await _check_engine(http, urls["server"], headers)
                await asyncio.sleep(POLL_EVERY_S)
    except TimeoutError:
        raise FakevllmError(
            f"The engine was not ready within {timeout_s:.0f} s: see the lines of the server above."
        ) from None


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=POLL_TIMEOUT_S))


async def _is_healthy(http: aiohttp.ClientSession, proxy_url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with http.get(f"{proxy_url}/health") as answer:
            return answer.status == 200
    return False


async def _check_engine(
    http: aiohttp.ClientSession, server_url: str, headers: Mapping[str, str]
) -> None:
    """Raise UserError if the engine is off and the server gives the reason."""
    try:
        async with http.get(f"{server_url}/get_engine_status", headers=headers) as answer:
            status = EngineStatusReply.model_validate_json(await answer.read())
    except (aiohttp.ClientError, OSError, TimeoutError, ValidationError):
        return  # the server has not started yet
    if status.engine_status is EngineStatus.OFFLINE and status.engine_status_detail:
        raise UserError(f"The engine did not start: {status.engine_status_detail}")
