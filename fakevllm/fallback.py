"""Another OpenAI-compatible server, asked when ours is not there. What it answers is served and
never trained."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from urllib.parse import urlsplit

import orjson

from fakevllm.naming import with_model
from fakevllm.outage_settings import FallbackSection
from fakevllm.relay import relay
from fakevllm.reply import AppReply
from fakevllm.siblings import Request
from fakevllm.upstream import LiveReply, Reply, Upstream
from fakevllm_adapters.errors import WireError, unavailable

MAX_SHOWN_CHARS = 300
_VLLMS_OWN = "continuous_usage_stats"
"""What our translations ask of a vLLM, and other servers may refuse."""


class Fallback:
    """Owns its connections; close() last."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        self._upstream = _Elsewhere(url, key)
        self._model = model

    @staticmethod
    def of(settings: FallbackSection) -> Fallback | None:
        if settings.url is None:
            return None
        return Fallback(settings.url, settings.key, settings.model)

    async def relay(self, request: Request, app: AppReply) -> Reply:
        """Raises WireError where it has no answer either, whatever it says: an error of a server
        that the app does not know would not be the app's."""
        model = self._model or request.model
        asked = with_model(request, model) if model else request
        return await relay(self._upstream, _plain(asked), app)

    async def close(self) -> None:
        await self._upstream.close()


class _Elsewhere(Upstream):
    """Its `/v1` may lie below a path; what it refuses is no answer."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        super().__init__(f"{parts.scheme}://{parts.netloc}", key)
        self._below = parts.path.rstrip("/").removesuffix("/v1")

    @contextlib.asynccontextmanager
    async def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[LiveReply]:
        async with super().live(method, self._below + path, body, headers) as live:
            if live.status != 200:
                said = b"".join([chunk async for chunk in live.chunks])
                raise _refused(live.status, said)
            yield live


def _plain(request: Request) -> Request:
    """Without what only a vLLM understands and the app did not ask for."""
    if request.exchange is None or not request.is_translated:
        return request
    options = request.body.get("stream_options")
    if not isinstance(options, dict) or _VLLMS_OWN not in options:
        return request
    del options[_VLLMS_OWN]
    return replace(request, asked=orjson.dumps(request.body))


def _refused(status: int, said: bytes) -> WireError:
    text = said[:MAX_SHOWN_CHARS].decode(errors="replace")
    return unavailable(f"The fallback answered {status}: {text}")
