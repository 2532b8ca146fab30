"""vLLM's HTTP as the server itself uses it: to probe, to watch, and to change weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from fakevllm_server.backends.vllm.answer import Answer, Json
from fakevllm_server.types.backend import ActionFailed, BackendError

log = logging.getLogger("fakevllm.server")

HEALTH_TIMEOUT_S = 5.0
LOOK_TIMEOUT_S = 30.0
"""What an API process answers by itself, on a busy machine."""
PAUSE_TIMEOUT_S = 120.0
"""The step in hand of a large batch ends first."""
RELOAD_TIMEOUT_S = 900.0
"""Weights of hundreds of gigabytes from a slow disk."""
NO_ROUTE = 404, 405
SAYS_NOTHING = aiohttp.ClientError, OSError, TimeoutError


class Control:
    """Connections to one vLLM, each used once: it closes kept ones when it likes."""

    def __init__(self, url: str, socket: Path | None, headers: Mapping[str, str]) -> None:
        connector: aiohttp.BaseConnector
        if socket is not None:
            connector = aiohttp.UnixConnector(str(socket), force_close=True, limit=0)
        else:
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._http = aiohttp.ClientSession(url, connector=connector, headers=headers)

    async def close(self) -> None:
        await self._http.close()

    async def get(self, path: str, timeout_s: float = LOOK_TIMEOUT_S) -> Answer:
        return await self._ask("GET", path, None, timeout_s)

    async def post(
        self, path: str, body: Json | None = None, timeout_s: float = LOOK_TIMEOUT_S
    ) -> Answer:
        return await self._ask("POST", path, body, timeout_s)

    async def is_healthy(self) -> bool:
        return (await self.get("/health", HEALTH_TIMEOUT_S)).is_ok

    async def pause(self) -> None:
        """No step is run from here to `resume`. Raises as `load_weights`."""
        await self._act("/pause?mode=keep", PAUSE_TIMEOUT_S)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Of a paused vLLM, so that no step runs on a mixture; it goes on then. Raises ActionFailed
        where vLLM says it could not, BackendError where it says nothing; it stays paused then."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._act("/collective_rpc", RELOAD_TIMEOUT_S, body)
        # What the old weights computed goes, of paused requests too: they begin again from their
        # tokens.
        path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
        answer = await self._act(path, PAUSE_TIMEOUT_S)
        # Older versions answer 200 and say nothing.
        if answer.json.get("success") is False:
            raise ActionFailed("reset_prefix_cache: blocks of the old weights' are still in use")
        if not await self.tell_version(version):
            log.debug("vLLM was not told the version of its weights: it keeps none")
        await self.resume()

    async def resume(self) -> None:
        await self._act("/resume", LOOK_TIMEOUT_S)

    async def is_paused(self) -> bool:
        return (await self.get("/is_paused")).json.get("is_paused") is True

    async def tell_version(self, version: int) -> bool:
        """False where this vLLM keeps no version of its weights."""
        body = {"new_version": str(version)}
        return (await self.post("/update_weight_version", body, HEALTH_TIMEOUT_S)).is_ok

    async def _act(self, path: str, timeout_s: float, body: Json | None = None) -> Answer:
        answer = await self.post(path, body, timeout_s)
        name = path.partition("?")[0].strip("/")
        if answer.status == 0:
            raise BackendError(f"vLLM did not answer {name}: {answer.detail}")
        if answer.status in NO_ROUTE:
            raise ActionFailed(
                f"it has no {name} (HTTP {answer.status}): "
                "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        if not answer.is_ok:
            raise ActionFailed(f"{name}: {answer.detail}")
        return answer

    async def _ask(self, method: str, path: str, body: Json | None, timeout_s: float) -> Answer:
        if self._http.closed:
            return Answer(0, b"it was ended")
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.request(method, path, json=body, timeout=timeout) as answer:
                return Answer(answer.status, await answer.read())
        except TimeoutError:
            return Answer(0, f"no answer within {timeout_s:g} s".encode())
        except SAYS_NOTHING as error:
            return Answer(0, f"{type(error).__name__}: {error}".encode())
