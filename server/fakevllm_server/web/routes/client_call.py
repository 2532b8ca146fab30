"""One call of a client's, in its own wire format, and how it is asked of the engine.

The engine is asked in chat completions or completions; its own route for the client's format is
used where we do not translate, and where the engine refuses: a refusal repeats what was asked, so
the client's own words must be what is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import orjson

from fakevllm_adapters.formats.base import Adapter, Exchange, Json, NotTranslated
from fakevllm_adapters.formats.registry import TOKEN_COUNTERS
from fakevllm_adapters.http.asgi import Send, send_bytes, send_json
from fakevllm_adapters.http.json_body import parse_object
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.errors import WireError, not_served
from fakevllm_adapters.vllm_compat.token_limits import (
    drop_limits_above_context,
    drop_token_limits,
    is_over_context,
)
from fakevllm_server.rollout.capture.table import CAPTURES
from fakevllm_server.rollout.engine_client import EngineClient, ErrorPredicate, Refused
from fakevllm_server.training.episode_body import with_job_sampling
from fakevllm_server.types.calls import RecordedCall
from fakevllm_server.types.weight_gate import CallStamp

SaveCall = Callable[[RecordedCall], Awaitable[None]]
Attempt = Callable[[EngineClient, CallStamp], Awaitable[None]]
_STARLETTE_NO_ROUTE = {"detail": "Not Found"}
"""Body of the 404 that Starlette, below vLLM's FastAPI, sends for a path without a route."""


@dataclass(frozen=True, slots=True)
class ClientCall:
    adapter: Adapter
    raw: bytes
    parsed: Json | None
    """None: not an object of JSON; the engine says so better than we could."""
    headers: dict[str, str]
    send: Send
    job: TrainJob | None = None
    """Of an active client's episode: what it adds to the call."""

    async def relay(self, upstream: EngineClient, stamp: CallStamp | None = None) -> None:
        if self.adapter.name in TOKEN_COUNTERS and await self._has_native(upstream):
            return
        exchange = self._open(upstream)
        if isinstance(exchange, WireError):
            return await self._native(upstream, exchange)

        async def ask(refuses: ErrorPredicate) -> None:
            asked, path = self._asked(exchange), self.adapter.upstream_path
            shown = self._shown(exchange)
            await upstream.relay("POST", path, asked, self.headers, self.send, refuses, shown)

        await self._ask(upstream, exchange, ask)

    def captured(self, keep: SaveCall) -> Attempt:
        """Each attempt is captured anew; one that is whole goes to `keep`."""

        async def attempt(upstream: EngineClient, stamp: CallStamp) -> None:
            if self.adapter.upstream_path not in CAPTURES:  # nothing is sampled there
                return await self.relay(upstream)
            exchange = self._open(upstream)
            if isinstance(exchange, WireError):
                return await self._native(upstream, exchange)
            if CAPTURES[self.adapter.upstream_path].cannot_capture(exchange.body):
                return await self.relay(upstream)

            async def ask(refuses: ErrorPredicate) -> None:
                await self._capture(upstream, exchange, stamp, keep, refuses)

            await self._ask(upstream, exchange, ask)

        return attempt

    async def _capture(
        self,
        upstream: EngineClient,
        exchange: Exchange,
        stamp: CallStamp,
        keep: SaveCall,
        refuses: ErrorPredicate,
    ) -> None:
        path, engine = self.adapter.upstream_path, upstream.endpoint
        capture = CAPTURES[path](
            exchange.body,
            engine.default_sampling,
            engine.refusal,
            reports_allowed=engine.reports_allowed,
        )

        async def finished() -> None:
            call = capture.record(stamp)
            if call is not None:
                await keep(call)

        shown, asked = self._shown(exchange), self._asked(exchange)
        await upstream.capture(
            path, capture, self.headers, self.send, finished, refuses, shown, asked
        )

    async def _ask(
        self,
        upstream: EngineClient,
        exchange: Exchange,
        ask: Callable[[ErrorPredicate], Awaitable[None]],
    ) -> None:
        """Once more without a limit where prompt and limit together are too long for the context.
        What is refused then is told of the first."""
        free = drop_token_limits(exchange.body)

        def refuses(status: int, body: Json) -> bool:
            return self._is_translated or (free is not None and is_over_context(status, body))

        try:
            return await ask(refuses)
        except Refused as refused:
            first = refused
        if free is not None and is_over_context(first.status, first.body):
            exchange.body = free
            with suppress(Refused):
                return await ask(_any)
        await self._refused(upstream, first)

    def _open(self, upstream: EngineClient) -> Exchange | WireError:
        """The exchange, or what to answer where the engine has no route of its own."""
        try:
            parsed = self.parsed if self.parsed is not None else parse_object(self.raw)
            exchange = self.adapter.open(parsed, upstream.info)
        except WireError as error:
            return error
        except NotTranslated as why:
            return why.error or not_served(str(why))
        if self.job is not None and self.adapter.upstream_path in CAPTURES:
            exchange.body = with_job_sampling(exchange.body, self.job)
        exchange.body = drop_limits_above_context(exchange.body, upstream.endpoint.max_model_len)
        try:
            orjson.dumps(exchange.body)
        except TypeError as error:  # numbers beyond 64 bits
            return not_served(str(error))
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
        if not self._is_translated:
            return await send_bytes(self.send, refused.status, refused.raw, refused.headers)
        if refused.status < 500 and await self._has_native(upstream):
            return
        worded = self.adapter.refusal(refused.status, refused.body)
        await send_bytes(self.send, refused.status, orjson.dumps(worded), refused.headers)

    async def _native(self, upstream: EngineClient, error: WireError) -> None:
        if not await self._has_native(upstream):
            await send_json(self.send, error.status, self.adapter.refusal(error.status, error.body))

    async def _has_native(self, upstream: EngineClient) -> bool:
        """Whether the engine has a route for the client's format, which then has answered."""
        path = self.adapter.path
        try:
            await upstream.relay("POST", path, self.raw, self.headers, self.send, _has_no_route)
        except Refused:
            return False
        return True


def _has_no_route(status: int, body: Json) -> bool:
    return status == 404 and body == _STARLETTE_NO_ROUTE


def _any(status: int, body: Json) -> bool:
    return True
