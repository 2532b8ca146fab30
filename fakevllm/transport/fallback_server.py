"""Client for the fallback server: another OpenAI-compatible server, which answers while the engine
is unavailable. Its answers are served and never trained."""

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
from fakevllm_adapters.http.receipt_headers import without_version
from fakevllm_adapters.protocol.errors import WireError, unavailable

MAX_SHOWN_CHARS = 300
"""Maximum number of characters of the fallback server's error message that are logged."""
STREAM_BEGINS_S = 60.0
"""Seconds within which the fallback server must begin a stream. A healthy server begins a stream
within this time even if the request must wait in a queue first."""
ANSWER_BEGINS_S = 600.0
"""Seconds within which the fallback server must begin an answer that is not streamed. A server
sends the first byte of such an answer only when the whole answer is sampled. The limit equals the
default timeout of OpenAI's SDK."""
_VLLM_OPTION = "continuous_usage_stats"
"""Stream option of vLLM that the proxy sets when it translates a request. Servers other than vLLM
may refuse this option."""


class Fallback:
    """Client for the fallback server. The client has its own connections. Call `close()` after the
    last use."""

    def __init__(
        self,
        url: str,
        key: str | None,
        model: str | None,
        *,
        stream_begins_s: float = STREAM_BEGINS_S,
        answer_begins_s: float = ANSWER_BEGINS_S,
    ) -> None:
        """Create the client. `model` is the model that is requested from the fallback server. If
        `model` is None, the model name in the app's request is used."""
        self._streaming = _FallbackClient(url, key, stream_begins_s)
        self._whole = _FallbackClient(url, key, answer_begins_s)
        self._model = model

    @staticmethod
    def from_settings(settings: FallbackSection) -> Fallback | None:
        """Return the client for the configured fallback server. Return None if no fallback server
        is configured."""
        if settings.url is None:
            return None
        return Fallback(settings.url, settings.key, settings.model)

    async def relay(self, request: Request, app: AppResponse) -> EngineResponse:
        """Relay the answer of the fallback server to the app, and return this answer.

        Raises WireError if the fallback server has no answer or refuses the request. The fallback
        server's error messages are not sent to the app, because the app does not know that there
        is a fallback server.
        """
        model = self._model or request.model
        named = with_model(request, model) if model else request
        named = replace(named, arm=None)
        upstream = self._streaming if request.streamed else self._whole
        return await relay(upstream, _without_vllm_options(named), app)

    async def close(self) -> None:
        await self._streaming.close()
        await self._whole.close()


class _FallbackClient(EngineClient):
    """Client for a server whose `/v1` may be below a path prefix, as in `https://host/prefix/v1`.

    A response with a status other than 200 raises WireError. A response that does not begin within
    `begins_s` seconds raises WireError too.
    """

    def __init__(self, url: str, key: str | None, begins_s: float) -> None:
        parts = urlsplit(url)
        super().__init__(f"{parts.scheme}://{parts.netloc}", key)
        self._begins_s = begins_s
        self._path_prefix = parts.path.rstrip("/").removesuffix("/v1")

    @contextlib.asynccontextmanager
    async def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[LiveResponse]:
        limit = asyncio.timeout(self._begins_s)
        call = super().live(method, self._path_prefix + path, body, headers)
        try:
            async with limit, call as live:
                if live.status != 200:
                    raw = await live.read()
                    raise _refusal(live.status, raw)
                limit.reschedule(None)
                yield replace(live, headers=without_version(live.headers))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise unavailable(
                f"The fallback did not begin an answer within {self._begins_s:g} s."
            ) from error


def _without_vllm_options(request: Request) -> Request:
    """Return the request without vLLM's own stream option. The proxy adds this option when it
    translates a request."""
    if request.exchange is None or not request.is_translated:
        return request
    options = request.body.get("stream_options")
    if not isinstance(options, dict) or _VLLM_OPTION not in options:
        return request
    del options[_VLLM_OPTION]
    return replace(request, upstream_body=orjson.dumps(request.body))


def _refusal(status: int, raw: bytes) -> WireError:
    text = raw[:MAX_SHOWN_CHARS].decode(errors="replace")
    return unavailable(f"The fallback answered {status}: {text}")


def with_model(request: Request, model: str) -> Request:
    """Return the request with its model name replaced by `model`. If the body is not a JSON object,
    return the request unchanged."""
    try:
        raw = rewrite_body(request.raw, model=model)
    except (ValueError, AttributeError, RecursionError):
        return request
    if request.exchange is None:
        return replace(request, raw=raw, upstream_body=raw)
    request.exchange.body["model"] = model
    body = orjson.dumps(request.exchange.body) if request.is_translated else raw
    return replace(request, raw=raw, upstream_body=body)
