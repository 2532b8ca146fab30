"""Send one call of a client to the engine. The call arrives in the client's API format.

The call is usually translated to a chat completions or completions request for the engine. In two
cases, the client's original request is sent to the engine's own route for the client's format.
Either the call cannot be translated, or the engine refuses the translated request. The engine's
error messages quote the request. An error of the engine's own route therefore quotes the client's
own request, and not the translation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import orjson

from fakevllm_adapters.formats.base import Adapter, Exchange, Json, NotTranslated
from fakevllm_adapters.formats.registry import TOKEN_COUNTERS
from fakevllm_adapters.formats.responses.adapter import ResponsesExchange
from fakevllm_adapters.http.asgi import Send, send_bytes, send_json
from fakevllm_adapters.http.json_body import parse_object
from fakevllm_adapters.http.receipt_headers import VersionedSend
from fakevllm_adapters.http.response_ids import chooses_response_id, watch_response_id
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.privacy.redactor import OFF, Redactor
from fakevllm_adapters.protocol.errors import WireError, bad_request, not_served
from fakevllm_adapters.protocol.swarm import SiblingRange, SiblingRef
from fakevllm_adapters.vllm_compat.token_limits import (
    drop_limits_above_context,
    drop_token_limits,
    is_over_context,
)
from fakevllm_runtime.body_search import finds_in_body
from fakevllm_server.rollout.capture.base import CallCapture
from fakevllm_server.rollout.capture.capture_registry import CAPTURES
from fakevllm_server.rollout.capture.shared_call import CannotShare, CompleteChoice, SharedCapture
from fakevllm_server.rollout.engine_client import (
    EngineClient,
    ErrorPredicate,
    NotWritable,
    Refused,
    write_body,
)
from fakevllm_server.training.episode_sampling import with_job_sampling
from fakevllm_server.types.calls import RecordedCall
from fakevllm_server.types.weight_versions import CallStamp

SaveCall = Callable[[RecordedCall], Awaitable[None]]
"""Function that saves a captured call."""
SaveSiblingCalls = Callable[[Sequence[tuple[SiblingRef, RecordedCall]]], Awaitable[None]]
"""Function that saves captured calls, each with its sibling."""
Attempt = Callable[[EngineClient, CallStamp], Awaitable[None]]
"""Function that sends a call to an engine, and sends the answer to the client. If the function has
raised EngineFailed, it may be called again."""
_STARLETTE_NO_ROUTE = {"detail": "Not Found"}
"""Body of the 404 that Starlette, below vLLM's FastAPI, sends for a path without a route."""


@dataclass(frozen=True, slots=True)
class ClientCall:
    """One call of a client. Its methods send the call to the engine, and send the engine's answer
    to the client."""

    adapter: Adapter
    """Adapter of the client's wire format."""
    raw: bytes
    """Request body as the client sent it."""
    parsed: Json | None
    """Parsed body. None if the body is not a JSON object. In that case, the engine gets the
    original body and answers with an error."""
    headers: dict[str, str]
    """HTTP headers to send to the engine."""
    send: Send
    job: TrainJob | None = None
    """Job whose sampling settings are added to an episode's call; None for other calls."""
    store: Callable[[str, bytes | None], None] | None = None
    """Function that stores the id and the body of an answer in the Responses format. The body is
    None if the answer came from the engine's own route. Answers in other formats are not stored."""
    reports_version: bool = False
    """Whether the client gets the version of the weights as a response header."""
    policy_version: int | None = None
    """Version of the policy that the call names; None if it names the served weights."""
    redactor: Redactor = OFF
    """Redactor of the texts whose tokens are not kept."""

    async def relay(self, engine: EngineClient, stamp: CallStamp | None = None) -> None:
        """Send the call to the engine, and send the engine's answer to the client. The call's
        tokens are not recorded.

        Raises EngineFailed if the engine fails before anything was sent to the client.
        """
        if self.reports_version and stamp is not None and self.adapter.name not in TOKEN_COUNTERS:
            send = VersionedSend(self.send, partial(self._known_version, stamp))
            return await replace(self, send=send, reports_version=False).relay(engine)
        if self.adapter.name in TOKEN_COUNTERS and await self._try_native_route(engine):
            return
        exchange = self._open(engine)
        if isinstance(exchange, WireError):
            return await self._native_route_or_error(engine, exchange)

        async def request(raises_refused: ErrorPredicate) -> None:
            await engine.relay(
                "POST",
                self.adapter.upstream_path,
                self._request_body(exchange),
                self.headers,
                self.send,
                raises_refused,
                self._translation(exchange),
            )

        try:
            await self._request_with_retry(engine, exchange, request)
        except NotWritable as error:
            await self._native_route_or_error(engine, not_served(str(error)))

    def _known_version(self, stamp: CallStamp) -> int | None:
        return stamp.known_version if self.policy_version is None else self.policy_version

    def captured(self, save: SaveCall) -> Attempt:
        """Return a function that makes one attempt to answer the call, and records the call's
        tokens.

        Each attempt records the answer from its beginning. When an attempt has the complete answer,
        the returned function calls `save` with the recorded call.
        """

        async def attempt(engine: EngineClient, stamp: CallStamp) -> None:
            if self.adapter.upstream_path not in CAPTURES:  # the route samples no tokens
                return await self.relay(engine, stamp)
            exchange = self._open(engine)
            if isinstance(exchange, WireError):
                return await self._native_route_or_error(engine, exchange)
            if CAPTURES[self.adapter.upstream_path].cannot_capture(exchange.body):
                return await self.relay(engine, stamp)

            async def request(raises_refused: ErrorPredicate) -> None:
                await self._capture(engine, exchange, stamp, save, raises_refused)

            try:
                await self._request_with_retry(engine, exchange, request)
            except NotWritable as error:
                await self._native_route_or_error(engine, not_served(str(error)))

        return attempt

    def captured_siblings(self, siblings: SiblingRange, save: SaveSiblingCalls) -> Attempt:
        """Return a function that makes one attempt to sample several siblings (answers to the same
        request) with one model call. The call's `n` is the number of siblings. Each answer is
        recorded as if it had been sampled by a separate call.

        The returned function raises WireError (400) if one model call cannot sample the siblings.
        It calls `save` with the recorded calls before it sends the answers to the client.
        """

        async def attempt(engine: EngineClient, stamp: CallStamp) -> None:
            exchange = self._open(engine)
            if isinstance(exchange, WireError):
                raise exchange
            if self._is_translated or self.adapter.path not in CAPTURES:
                raise bad_request("The siblings of this route need a call each.")
            if exchange.body.get("n") != siblings.num:
                raise bad_request(f"`n` must be {siblings.num}, the number of siblings.", "n")

            async def request(raises_refused: ErrorPredicate) -> None:
                await self._capture_siblings(
                    engine, exchange, stamp, siblings, save, raises_refused
                )

            try:
                await self._request_with_retry(engine, exchange, request)
            except NotWritable as error:
                raise not_served(str(error)) from error
            except CannotShare as reason:
                raise bad_request(f"Each sibling needs a call of its own: {reason}.", "n") from None

        return attempt

    async def _capture_siblings(
        self,
        engine: EngineClient,
        exchange: Exchange,
        stamp: CallStamp,
        siblings: SiblingRange,
        save: SaveSiblingCalls,
        raises_refused: ErrorPredicate,
    ) -> None:
        path = self.adapter.upstream_path
        body = {name: value for name, value in exchange.body.items() if name != "n"}
        if CAPTURES[path].cannot_capture(body):
            raise CannotShare("it cannot be trained on")
        is_redacted = await self._is_redacted(exchange)
        create_capture = partial(self._create_capture, engine, is_redacted=is_redacted)
        shared = SharedCapture(path, body, siblings.num, engine.forms, create_capture)
        refs = siblings.siblings

        async def on_complete(choices: Sequence[CompleteChoice]) -> None:
            calls = [(refs[one.index], await _record(one.capture, stamp)) for one in choices]
            await save([(ref, call) for ref, call in calls if call is not None])

        def version_of(capture: CallCapture) -> int | None:
            return _version(capture, stamp) if self.reports_version else None

        await engine.capture_siblings(
            path,
            shared,
            self.headers,
            siblings.first,
            self.send,
            on_complete,
            raises_refused,
            version_of,
        )

    async def _is_redacted(self, exchange: Exchange) -> bool:
        """Return True if the request has text that must be redacted. Raises NotWritable if the
        request cannot be written as JSON."""
        if not self.redactor:
            return False
        return await finds_in_body(self.redactor, self._request_body(exchange))

    def _create_capture(
        self, engine: EngineClient, body: Json, *, is_redacted: bool
    ) -> CallCapture:
        endpoint = engine.endpoint
        return CAPTURES[self.adapter.upstream_path](
            body,
            endpoint.default_sampling,
            endpoint.refusal,
            reports_allowed=endpoint.reports_allowed,
            replica=endpoint.replica,
            redactor=self.redactor,
            is_redacted=is_redacted,
        )

    async def _capture(
        self,
        engine: EngineClient,
        exchange: Exchange,
        stamp: CallStamp,
        save: SaveCall,
        raises_refused: ErrorPredicate,
    ) -> None:
        is_redacted = await self._is_redacted(exchange)
        capture = self._create_capture(engine, exchange.body, is_redacted=is_redacted)

        async def on_finished() -> None:
            call = await _record(capture, stamp)
            if call is not None:
                await save(call)

        send = self.send
        if self.reports_version:
            send = VersionedSend(send, lambda: _version(capture, stamp))
        await engine.capture(
            self.adapter.upstream_path,
            capture,
            self.headers,
            send,
            on_finished,
            raises_refused,
            self._translation(exchange),
            partial(self._request_body, exchange),
        )

    async def _request_with_retry(
        self,
        engine: EngineClient,
        exchange: Exchange,
        request: Callable[[ErrorPredicate], Awaitable[None]],
    ) -> None:
        """Send the request to the engine.

        If prompt and token limit together exceed the context, the engine refuses the request. The
        request is then sent once more without the token limit. If the engine refuses the second
        request too, the client gets the first error.
        """
        unlimited = drop_token_limits(exchange.body)

        def raises_refused(status: int, body: Json) -> bool:
            is_retried = unlimited is not None and is_over_context(status, body)
            return self._is_translated or is_retried

        try:
            return await request(raises_refused)
        except Refused as refused:
            first = refused
        if unlimited is not None and is_over_context(first.status, first.body):
            exchange.body = unlimited
            with suppress(Refused):
                return await request(_is_any_error)
        await self._send_refusal(engine, first)

    def _open(self, engine: EngineClient) -> Exchange | WireError:
        """Return the exchange for this call. An exchange is the object that translates the call to
        the engine's format and the answer back.

        The exchange's request body is ready for the engine. It has the job's sampling settings.
        From a chat request, a token limit that exceeds the context is removed. If the call cannot
        be translated, return an error instead. The client gets this error only if the engine has no
        route for the client's format.
        """
        try:
            parsed = self.parsed if self.parsed is not None else parse_object(self.raw)
            exchange = self.adapter.open(parsed, engine.info)
        except WireError as error:
            return error
        except NotTranslated as reason:
            return reason.error or not_served(str(reason))
        if self.job is not None and self.adapter.upstream_path in CAPTURES:
            exchange.body = with_job_sampling(exchange.body, self.job)
        if self.store is not None and isinstance(exchange, ResponsesExchange):
            exchange.on_response = partial(self.store, exchange.response_id)
        exchange.body = drop_limits_above_context(exchange.body, engine.endpoint.max_model_len)
        return exchange

    @property
    def _is_translated(self) -> bool:
        return self.adapter.path != self.adapter.upstream_path

    def _translation(self, exchange: Exchange) -> Exchange | None:
        """Return `exchange` (the object that translates the call and its answer) if the answer must
        be translated. Return None if the client's format is the engine's format."""
        return exchange if self._is_translated else None

    def _request_body(self, exchange: Exchange) -> bytes:
        """Return the request body for the engine. If the body was not changed, return the client's
        own bytes."""
        return self.raw if exchange.body is self.parsed else write_body(exchange.body)

    async def _send_refusal(self, engine: EngineClient, refused: Refused) -> None:
        if not self._is_translated:
            return await send_bytes(self.send, refused.status, refused.raw, refused.headers)
        if refused.status < 500 and await self._try_native_route(engine):
            return
        error = self.adapter.refusal(refused.status, refused.body)
        await send_bytes(self.send, refused.status, orjson.dumps(error), refused.headers)

    async def _native_route_or_error(self, engine: EngineClient, error: WireError) -> None:
        if not await self._try_native_route(engine):
            await send_json(self.send, error.status, self.adapter.refusal(error.status, error.body))

    async def _try_native_route(self, engine: EngineClient) -> bool:
        """Send the client's original request to the engine's own route for the client's format.

        If the engine has such a route, send its answer to the client and return True. If there is
        no such route, return False, and send nothing to the client.
        """
        path, send, store = self.adapter.path, self.send, self.store
        if store is not None and not chooses_response_id(self.raw, self.parsed):
            send = watch_response_id(send, lambda response_id: store(response_id, None))
        try:
            await engine.relay("POST", path, self.raw, self.headers, send, _is_missing_route)
        except Refused:
            return False
        return True


def _is_missing_route(status: int, body: Json) -> bool:
    return status == 404 and body == _STARLETTE_NO_ROUTE


def _is_any_error(status: int, body: Json) -> bool:
    return True


def _version(capture: CallCapture, stamp: CallStamp) -> int | None:
    """Return the version of the weights that sampled the first token of an answer. Return None if
    the version is not certain. A version that the engine has reported takes precedence over the
    version that the server knew when the call began."""
    reported = capture.first_version
    return stamp.known_version if reported is None else reported


async def _record(capture: CallCapture, stamp: CallStamp) -> RecordedCall | None:
    """Return the model call that `capture` has recorded, with its tokens. This takes long for an
    answer with thousands of sets of allowed tokens, and for a long answer that is searched for
    texts to redact. In these cases, a worker thread does the work, so that the event loop is not
    blocked."""
    if capture.takes_long:
        return await asyncio.to_thread(capture.record, stamp)
    return capture.record(stamp)
