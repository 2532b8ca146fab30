"""One call of a client's, in its own wire format, and how it is asked of the engine.

The engine is asked in chat completions or completions; its own route for the client's format is
used where we do not translate, and where the engine refuses: a refusal repeats what was asked, so
the client's own words must be what is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from fakevllm_adapters.asgi import Send, send_bytes, send_json
from fakevllm_adapters.base import Adapter, Exchange, Json, Untranslated
from fakevllm_adapters.body import object_of
from fakevllm_adapters.context import within_context
from fakevllm_adapters.errors import WireError, not_served
from fakevllm_server.calls import RecordedCall
from fakevllm_server.captures import CAPTURES
from fakevllm_server.forward import EngineClient, Refused
from fakevllm_server.weight_gate import CallStamp

Attempt = Callable[[EngineClient, CallStamp], Awaitable[None]]

_NO_ROUTE = {"detail": "Not Found"}


@dataclass(frozen=True, slots=True)
class Inbound:
    adapter: Adapter
    raw: bytes
    parsed: Json | None
    """None: not an object of JSON; the engine says so better than we could."""
    headers: dict[str, str]
    send: Send

    async def relay(self, upstream: EngineClient, stamp: CallStamp | None = None) -> None:
        exchange = self._open(upstream)
        if isinstance(exchange, WireError):
            return await self._native(upstream, exchange)
        asked = self._asked(exchange)
        try:
            await upstream.relay(
                "POST",
                self.adapter.upstream_path,
                asked,
                self.headers,
                self.send,
                self._shown(exchange),
            )
        except Refused as refused:
            await self._refused(upstream, refused)

    def captured(self, keep: Callable[[RecordedCall], None]) -> Attempt:
        """Each attempt is captured anew; one that is whole goes to `keep`."""

        async def attempt(upstream: EngineClient, stamp: CallStamp) -> None:
            exchange = self._open(upstream)
            if isinstance(exchange, WireError):
                return await self._native(upstream, exchange)
            engine = upstream.endpoint
            kind = CAPTURES[self.adapter.upstream_path]
            if kind.refuses(exchange.body):
                return await self.relay(upstream)
            capture = kind(exchange.body, engine.default_sampling, engine.refusal)

            def finished() -> None:
                call = capture.record(stamp)
                if call is not None:
                    keep(call)

            path = self.adapter.upstream_path
            shown = self._shown(exchange)
            try:
                await upstream.capture(path, capture, self.headers, self.send, finished, shown)
            except Refused as refused:
                await self._refused(upstream, refused)

        return attempt

    def _open(self, upstream: EngineClient) -> Exchange | WireError:
        """The exchange, or what to answer where the engine has no route of its own."""
        try:
            parsed = self.parsed if self.parsed is not None else object_of(self.raw)
            exchange = self.adapter.open(parsed, upstream.facts)
        except WireError as error:
            return error
        except Untranslated as why:
            return why.error or not_served(str(why))
        exchange.body = within_context(exchange.body, upstream.endpoint.max_model_len)
        return exchange

    @property
    def _is_translated(self) -> bool:
        return self.adapter.path != self.adapter.upstream_path

    def _shown(self, exchange: Exchange) -> Exchange | None:
        """None: the engine's bytes are the client's."""
        return exchange if self._is_translated else None

    def _asked(self, exchange: Exchange) -> bytes:
        return self.raw if exchange.body is self.parsed else orjson.dumps(exchange.body)

    async def _refused(self, upstream: EngineClient, refused: Refused) -> None:
        if refused.status < 500 and await self._has_native(upstream):
            return
        worded = self.adapter.refusal(refused.status, refused.body)
        await send_bytes(self.send, refused.status, orjson.dumps(worded), refused.headers)

    async def _native(self, upstream: EngineClient, error: WireError) -> None:
        if not await self._has_native(upstream):
            await send_json(self.send, error.status, self.adapter.refusal(error.status, error.body))

    async def _has_native(self, upstream: EngineClient) -> bool:
        """Whether the engine has a route for the client's format, which then has answered."""
        try:
            await upstream.relay_unless(
                _is_missing, "POST", self.adapter.path, self.raw, self.headers, self.send
            )
        except Refused:
            return False
        return True


def _is_missing(status: int, body: Any) -> bool:
    return status == 404 and body == _NO_ROUTE
