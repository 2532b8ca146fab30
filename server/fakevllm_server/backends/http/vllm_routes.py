"""vLLM's public HTTP routes, answered by a TokenEngine (an engine that samples tokens)."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.http.answer_parts import PartEncoder
from fakevllm_adapters.http.asgi import (
    ClientDisconnected,
    Headers,
    Receive,
    reason_headers,
    wait_for_disconnect,
)
from fakevllm_adapters.http.complete_choices import CHOICES_HEADER, SentChoice
from fakevllm_adapters.protocol.errors import WireError, bad_content_type, internal_error
from fakevllm_adapters.protocol.separate_prompts import ASKED, PROMPTS_HEADER, sizes_header
from fakevllm_adapters.vllm_compat.chat_request import parse_chat_request
from fakevllm_adapters.vllm_compat.chat_response import model_card
from fakevllm_adapters.vllm_compat.completions import parse_completion_request
from fakevllm_server.backends.http.chat_completion import ChatCompletion
from fakevllm_server.backends.http.engine_metrics import MeasuredEngine
from fakevllm_server.backends.http.policies import PolicyEngine
from fakevllm_server.backends.http.preparation import PreparationThreads
from fakevllm_server.backends.http.text_completion import TextCompletion
from fakevllm_server.backends.http.tokenization import detokenize, tokenize
from fakevllm_server.types.backend import TokenEngine

Json = dict[str, Any]
Result = TypeVar("Result")
Endpoint = Callable[[Request], Awaitable[Response]]
VERSION = "0.33.0+fakevllm"


class SampledRequest(Protocol):
    """A request for chat completions or text completions. Exactly one of the methods `answer`,
    `chunks` and `complete_choices` must be called, and only once."""

    separate_prompt: bytes | None
    """The prompt's token ids to send in front of the response, or None."""

    async def answer(self) -> Json: ...
    def chunks(self) -> AsyncGenerator[Json]: ...
    def complete_choices(self) -> AsyncGenerator[SentChoice]: ...


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """The options that a client has set by headers: the id of the response, and which parts of the
    response are sent separately."""

    request_id: str | None
    separates_prompt: bool
    """Whether the prompt's token ids are sent before the rest of the response."""
    separates_choices: bool
    """Whether each choice is sent as a part of the response when it is complete."""

    @staticmethod
    def of(request: Request) -> ResponseForm:
        headers = request.headers
        return ResponseForm(
            headers.get("x-request-id"),
            headers.get(PROMPTS_HEADER) == ASKED,
            headers.get(CHOICES_HEADER) == ASKED,
        )


class PublicRoutes:
    """The handlers of vLLM's public routes, except /health."""

    def __init__(
        self,
        engine: TokenEngine,
        threads: PreparationThreads,
        policies: PolicyEngine | None = None,
    ) -> None:
        self._engine = MeasuredEngine(engine)
        self._threads = threads
        self._policies = policies

    def routes(self) -> list[Route]:
        return [
            get_route("/version", self.version),
            get_route("/v1/models", self.models),
            get_route("/load", self.load),
            get_route("/metrics", self.metrics),
            get_route("/ping", self.ping, "POST"),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def version(self, request: Request) -> Response:
        return _json({"version": VERSION})

    async def models(self, request: Request) -> Response:
        name, length = self._engine.model_name, self._engine.max_model_len
        cards = [model_card(name, name, int(time.time()), length)]
        for policy in self._policies.names.loaded if self._policies is not None else ():
            cards.append(model_card(policy, policy, int(time.time()), length) | {"parent": name})
        return _json({"object": "list", "data": cards})

    def _engine_for(self, model: str | None) -> TokenEngine:
        """Return the engine that samples for a request with the model name `model`. For an unknown
        name, return the main engine; the checks of the request refuse the name later."""
        if self._policies is None or model is None:
            return self._engine
        policy = self._policies.policy(model)
        return self._engine if policy is None else MeasuredEngine(policy, self._engine.metrics)

    async def load(self, request: Request) -> Response:
        # vLLM reports 0 too unless it runs with --enable-server-load-tracking.
        return _json({"server_load": 0})

    async def metrics(self, request: Request) -> Response:
        return Response(self._engine.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def ping(self, request: Request) -> Response:
        return Response()

    async def chat(self, request: Request) -> Response:
        return await self._sampled(request, self._prepare_chat)

    async def completions(self, request: Request) -> Response:
        return await self._sampled(request, self._prepare_completions)

    def _prepare_chat(self, form: ResponseForm, raw: bytes) -> tuple[SampledRequest, bool]:
        body = parse_chat_request(raw)
        completion = ChatCompletion(
            self._engine_for(body.model),
            body,
            form.request_id,
            separates_prompt=form.separates_prompt,
            separates_choices=form.separates_choices,
        )
        return completion, bool(body.stream)

    def _prepare_completions(self, form: ResponseForm, raw: bytes) -> tuple[SampledRequest, bool]:
        body = parse_completion_request(raw)
        completion = TextCompletion(
            self._engine_for(body.common.model),
            body,
            form.request_id,
            separates_prompt=form.separates_prompt,
            separates_choices=form.separates_choices,
        )
        return completion, bool(body.common.stream)

    async def _sampled(
        self,
        request: Request,
        prepare: Callable[[ResponseForm, bytes], tuple[SampledRequest, bool]],
    ) -> Response:
        async def respond() -> Response:
            form = ResponseForm.of(request)
            sampled, is_streamed = await self._prepared(request, partial(prepare, form))
            if form.separates_choices:
                return _separate_choices(sampled)
            return await _sampled_response(request, sampled, is_streamed=is_streamed)

        return await _response_or_error(respond())

    async def tokenize(self, request: Request) -> Response:
        async def respond() -> Response:
            return _json(await self._prepared(request, partial(tokenize, self._engine)))

        return await _response_or_error(respond())

    async def detokenize(self, request: Request) -> Response:
        async def respond() -> Response:
            return _json(await self._prepared(request, partial(detokenize, self._engine)))

        return await _response_or_error(respond())

    async def _prepared(self, request: Request, prepare: Callable[[bytes], Result]) -> Result:
        """Read the request body, run `prepare(body)` on a thread that parses and checks requests,
        and return the result.

        Raises ClientDisconnected if the client disconnects before the result is available.
        """
        raw = await _json_body(request)
        prepared = self._threads.run(len(raw), partial(prepare, raw))
        return await _cancel_on_disconnect(request.receive, prepared)


def get_route(path: str, endpoint: Endpoint, *other_methods: str) -> Route:
    """Return a Starlette route for GET and `other_methods`. Starlette adds HEAD to every GET route;
    this function removes it, because vLLM answers HEAD with status 405."""
    route = Route(path, endpoint, methods=["GET", *other_methods])
    assert route.methods is not None
    route.methods.discard("HEAD")
    return route


async def _json_body(request: Request) -> bytes:
    """Return the raw body of a request. Raises WireError if the content type is not JSON."""
    if "json" not in request.headers.get("content-type", "json"):
        raise bad_content_type()
    return await request.body()


async def _response_or_error(response: Awaitable[Response]) -> Response:
    """Await and return the response. If a WireError is raised meanwhile, return the error response
    that the WireError describes. If any other exception is raised, return an internal error. If the
    client has disconnected, return an empty response."""
    try:
        return await response
    except WireError as error:
        return _json(error.body, error.status, reason_headers(error.reason))
    except ClientDisconnected:
        return Response()  # nobody reads it
    except Exception:
        traceback.print_exc()
        error = internal_error()
        return _json(error.body, error.status)


def _prompt_headers(sampled: SampledRequest) -> dict[str, str]:
    """Return the header with the size of the prompt's token ids, if these ids are sent before the
    rest of the response. Otherwise return no header."""
    prompt = sampled.separate_prompt
    return {} if prompt is None else {PROMPTS_HEADER: sizes_header([prompt])}


def _separate_choices(sampled: SampledRequest) -> Response:
    encoder = PartEncoder()
    response = StreamingResponse(_choice_parts(sampled, encoder), headers=_prompt_headers(sampled))
    response.raw_headers += encoder.headers
    return response


async def _choice_parts(sampled: SampledRequest, encoder: PartEncoder) -> AsyncIterator[bytes]:
    """Yield the bytes of a response. If the prompt's token ids are sent separately, they come
    first. Then comes one part for each choice, as soon as the choice is complete."""
    if sampled.separate_prompt is not None:
        yield sampled.separate_prompt
    try:
        async with aclosing(sampled.complete_choices()) as choices:
            async for choice in choices:
                yield encoder.part(choice.to_part())
    # Translated: the status is already sent, so the error becomes a part of the response.
    except Exception as exception:
        traceback.print_exc()
        error = exception if isinstance(exception, WireError) else internal_error()
        yield encoder.part(SentChoice(0, error.body, b"").to_part())
    yield encoder.end()


async def _sampled_response(
    request: Request, sampled: SampledRequest, *, is_streamed: bool
) -> Response:
    prompt, headers = sampled.separate_prompt, _prompt_headers(sampled)
    if is_streamed:
        return StreamingResponse(_events(sampled), headers=headers, media_type="text/event-stream")
    answer = orjson.dumps(await _cancel_on_disconnect(request.receive, sampled.answer()))
    return Response((prompt or b"") + answer, headers=headers, media_type="application/json")


async def _events(sampled: SampledRequest) -> AsyncIterator[bytes]:
    if sampled.separate_prompt is not None:
        yield sampled.separate_prompt
    try:
        async with aclosing(sampled.chunks()) as chunks:
            async for chunk in chunks:
                yield encode(chunk)
    # Translated: the status is already sent, so the error becomes an event of the stream.
    except Exception as exception:
        traceback.print_exc()
        error = exception if isinstance(exception, WireError) else internal_error()
        yield encode(error.body)
    yield DONE


async def _cancel_on_disconnect(receive: Receive, result: Awaitable[Result]) -> Result:
    """Await `result` and return its value. If the client disconnects first, cancel `result` and
    raise ClientDisconnected."""
    task = asyncio.ensure_future(result)
    disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


def _json(value: object, status: int = 200, headers: Headers | None = None) -> Response:
    response = Response(orjson.dumps(value), status, media_type="application/json")
    response.raw_headers += headers or []
    return response
