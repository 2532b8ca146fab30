"""Another OpenAI-compatible server, asked when ours is not there. What it answers is served and
never trained."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from urllib.parse import urlsplit

import orjson

from fakevllm.config.upstream import FallbackSection
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient, EngineResponse, LiveResponse
from fakevllm.transport.relay import relay
from fakevllm.transport.request import Request
from fakevllm_adapters.http.client_body import rewrite_body
from fakevllm_adapters.protocol.errors import WireError, unavailable

MAX_SHOWN_CHARS = 300
STREAM_BEGINS_S = 60.0
"""Within it a server that lives has begun a stream, also one that queues its requests."""
ANSWER_BEGINS_S = 600.0
"""What comes in one piece begins when it is done: as long as OpenAI's SDK waits by default."""
_VLLM_OPTION = "continuous_usage_stats"
"""What our translations ask of a vLLM, and other servers may refuse."""


class Fallback:
    """Owns its connections; close() last."""

    def __init__(
        self,
        url: str,
        key: str | None,
        model: str | None,
        *,
        stream_begins_s: float = STREAM_BEGINS_S,
        answer_begins_s: float = ANSWER_BEGINS_S,
    ) -> None:
        self._streaming = _FallbackClient(url, key, stream_begins_s)
        self._whole = _FallbackClient(url, key, answer_begins_s)
        self._model = model

    @staticmethod
    def from_settings(settings: FallbackSection) -> Fallback | None:
        if settings.url is None:
            return None
        return Fallback(settings.url, settings.key, settings.model)

    async def relay(self, request: Request, app: AppResponse) -> EngineResponse:
        """Raises WireError where it has no answer either, whatever it says: an error of a server
        that the app does not know would not be the app's."""
        model = self._model or request.model
        asked = with_model(request, model) if model else request
        upstream = self._streaming if request.streamed else self._whole
        return await relay(upstream, _without_vllm_options(asked), app)

    async def close(self) -> None:
        await self._streaming.close()
        await self._whole.close()


class _FallbackClient(EngineClient):
    """Its `/v1` may lie below a path; what it refuses is no answer, and neither is
    one that does not begin within `begins_s`."""

    def __init__(self, url: str, key: str | None, begins_s: float) -> None:
        parts = urlsplit(url)
        super().__init__(f"{parts.scheme}://{parts.netloc}", key)
        self._begins_s = begins_s
        self._path_prefix = parts.path.rstrip("/").removesuffix("/v1")

    @contextlib.asynccontextmanager
    async def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[LiveResponse]:
        begins = asyncio.timeout(self._begins_s)
        try:
            async with (
                begins,
                super().live(method, self._path_prefix + path, body, headers) as live,
            ):
                if live.status != 200:
                    said = b"".join([chunk async for chunk in live.chunks])
                    raise _refused(live.status, said)
                begins.reschedule(None)
                yield live
        except TimeoutError as error:
            if not begins.expired():
                raise
            raise unavailable(f"The fallback said nothing for {self._begins_s:g} s.") from error


def _without_vllm_options(request: Request) -> Request:
    """Without what only a vLLM understands and the app did not ask for."""
    if request.exchange is None or not request.is_translated:
        return request
    options = request.body.get("stream_options")
    if not isinstance(options, dict) or _VLLM_OPTION not in options:
        return request
    del options[_VLLM_OPTION]
    return replace(request, upstream_body=orjson.dumps(request.body))


def _refused(status: int, said: bytes) -> WireError:
    text = said[:MAX_SHOWN_CHARS].decode(errors="replace")
    return unavailable(f"The fallback answered {status}: {text}")


# The same request of another model.


def with_model(request: Request, model: str) -> Request:
    """What is no object of JSON names no model, and stays as it is."""
    try:
        raw = rewrite_body(request.raw, model=model)
    except (ValueError, AttributeError, RecursionError):
        return request
    if request.exchange is None:
        return replace(request, raw=raw, upstream_body=raw)
    request.exchange.body["model"] = model
    upstream_body = orjson.dumps(request.exchange.body) if request.is_translated else raw
    return replace(request, raw=raw, upstream_body=upstream_body)
