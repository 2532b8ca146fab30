"""HTTP client that controls a vLLM server. The client checks vLLM's health, and replaces vLLM's
weights. It also sends probe requests, which show what vLLM supports and which weights it has.

Every request has a timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from fakevllm_server.backends.vllm.response import Json, VllmResponse
from fakevllm_server.types.backend import ActionFailed, BackendError

log = logging.getLogger("fakevllm.server")

HEALTH_TIMEOUT_S = 5.0
DEFAULT_TIMEOUT_S = 30.0
"""Timeout of requests that need only vLLM's API process and not its engine. It is long because the
machine may be busy."""
PAUSE_TIMEOUT_S = 120.0
"""Timeout of a pause. vLLM first finishes its current engine step, which may have a large batch."""
RELOAD_TIMEOUT_S = 900.0
"""Timeout of loading new weights. vLLM may read hundreds of gigabytes from a slow disk."""
SLEEP_TIMEOUT_S = 120.0
"""Timeout of falling asleep and of waking up. vLLM copies its weights to or from the CPU."""
NO_ROUTE = 404, 405
CONNECTION_ERRORS = aiohttp.ClientError, OSError, TimeoutError


class ControlClient:
    """HTTP client of one vLLM server. Each connection is used for one request only, because vLLM
    may close an idle connection at any time."""

    def __init__(self, url: str, socket: Path | None, headers: Mapping[str, str]) -> None:
        connector: aiohttp.BaseConnector
        if socket is not None:
            connector = aiohttp.UnixConnector(str(socket), force_close=True, limit=0)
        else:
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._http = aiohttp.ClientSession(url, connector=connector, headers=headers)
        self._is_cache_asleep = False
        """Whether vLLM has freed the memory of its KV cache, or may have."""

    async def close(self) -> None:
        await self._http.close()

    async def get(self, path: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> VllmResponse:
        """Send a GET request to vLLM, and return the response. If the connection fails or the
        request times out, the response has status 0."""
        return await self._send("GET", path, None, timeout_s)

    async def post(
        self, path: str, body: Json | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> VllmResponse:
        """Send a POST request to vLLM, and return the response. If the connection fails or the
        request times out, the response has status 0."""
        return await self._send("POST", path, body, timeout_s)

    async def is_healthy(self) -> bool:
        return (await self.get("/health", HEALTH_TIMEOUT_S)).is_ok

    async def pause(self) -> None:
        """Pause vLLM. vLLM runs no engine step until `resume`, and keeps its running requests.

        Raise ActionFailed if vLLM reports a failure. Raise BackendError if vLLM does not respond.
        """
        await self._require("/pause?mode=keep", PAUSE_TIMEOUT_S)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load new weights from a folder into a paused vLLM, and then resume vLLM.

        Because of the pause, no engine step uses a mixture of old and new weights. If loading
        fails, vLLM stays paused. Raise ActionFailed if vLLM reports a failure. Raise BackendError
        if vLLM does not respond.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._require("/collective_rpc", RELOAD_TIMEOUT_S, body)
        await self.serve(version)

    async def discard_weight_update(self) -> None:
        """End a weight update that has failed, so that weights can be loaded from a folder.

        vLLM counts the loaded numbers of each layer, to know when a layer is complete. After a
        failed update, the layers still count what they got. A further load would then complete
        them too early, with a part of their weights. The end of an update resets these counts.
        """
        # This fails if the update is still active.
        await self.post("/start_weight_update", {}, PAUSE_TIMEOUT_S)
        await self._require("/finish_weight_update", RELOAD_TIMEOUT_S, {})

    async def sleep(self) -> None:
        """Pause vLLM, and let it free the memory of its weights and its KV cache on the GPU. The
        weights are kept in the memory of the CPU. Running requests are kept too, and are computed
        again from their tokens later.

        Raise ActionFailed if vLLM reports a failure. Raise BackendError if vLLM does not respond.
        """
        self._is_cache_asleep = True
        await self._require("/sleep?level=1&mode=keep", SLEEP_TIMEOUT_S)

    async def wake_up_weights(self) -> None:
        """Let a sleeping vLLM get its weights back into the memory of the GPU. vLLM stays paused
        until `serve`, or until `wake_up_cache` and `resume`."""
        await self._require("/wake_up?tags=weights", SLEEP_TIMEOUT_S)

    async def wake_up_cache(self) -> None:
        """Let a vLLM whose KV cache sleeps get the memory for it again. If its weights are awake,
        vLLM may sample from then on."""
        if self._is_cache_asleep:
            await self._require("/wake_up?tags=kv_cache", SLEEP_TIMEOUT_S)
            self._is_cache_asleep = False

    async def serve(self, version: int) -> None:
        """Resume a paused vLLM that has new weights. Raise ActionFailed if vLLM reports a failure.
        Raise BackendError if vLLM does not respond."""
        # The KV cache of the old weights is discarded, also for paused requests. These are computed
        # again from their tokens.
        path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
        response = await self._require(path, PAUSE_TIMEOUT_S)
        # Older versions of vLLM respond with 200 and without "success".
        if response.json.get("success") is False:
            raise ActionFailed(
                "reset_prefix_cache failed: cache blocks of the old weights are still in use"
            )
        if not await self.update_version(version):
            log.debug("vLLM did not record the version of its weights: it has no such route")
        await self.wake_up_cache()
        await self.resume()

    async def resume(self) -> None:
        """Resume a paused vLLM. Raise ActionFailed if vLLM reports a failure. Raise BackendError if
        vLLM does not respond."""
        await self._require("/resume", DEFAULT_TIMEOUT_S)

    async def is_paused(self) -> bool:
        return (await self.get("/is_paused")).json.get("is_paused") is True

    async def world_size(self) -> int:
        """Return the number of vLLM's worker processes. Raise ActionFailed if vLLM does not report
        it."""
        response = await self.get("/get_world_size")
        size = response.json.get("world_size")
        if not isinstance(size, int):
            raise ActionFailed(f"vLLM does not report its number of workers: {response.detail}")
        return size

    async def update_version(self, version: int) -> bool:
        """Report the version of the current weights to vLLM. Return True if vLLM has recorded the
        version. Some versions of vLLM cannot record it."""
        body = {"new_version": str(version)}
        return (await self.post("/update_weight_version", body, HEALTH_TIMEOUT_S)).is_ok

    async def _require(self, path: str, timeout_s: float, body: Json | None = None) -> VllmResponse:
        """Send a POST request, and return the response if its status is 200. Raise ActionFailed if
        vLLM reports a failure. Raise BackendError if vLLM does not respond."""
        response = await self.post(path, body, timeout_s)
        name = path.partition("?")[0].strip("/")
        if response.status == 0:
            raise BackendError(f"vLLM did not respond to {name}: {response.detail}")
        if response.status in NO_ROUTE:
            raise ActionFailed(
                f"vLLM has no route {name} (HTTP {response.status}): "
                "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        if not response.is_ok:
            raise ActionFailed(f"{name} failed: {response.detail}")
        return response

    async def _send(
        self, method: str, path: str, body: Json | None, timeout_s: float
    ) -> VllmResponse:
        if self._http.closed:
            return VllmResponse(0, b"the connection was closed")
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.request(method, path, json=body, timeout=timeout) as response:
                return VllmResponse(response.status, await response.read())
        except TimeoutError:
            return VllmResponse(0, f"no response within {timeout_s:g} s".encode())
        except CONNECTION_ERRORS as error:
            return VllmResponse(0, f"{type(error).__name__}: {error}".encode())
