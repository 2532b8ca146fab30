"""The adapter (format translator) of /v1/responses. It translates requests to chat completions. The
app gets the same answers as from vLLM's own /v1/responses.

Items of a response keep the ids that the engine gave to tool calls. A tool call therefore has the
same id in the app's history and in the proxy's ledger of requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import orjson

from fakevllm_adapters.formats.base import Answer, EngineInfo, History, Json, NotTranslated
from fakevllm_adapters.formats.chat import ChatAdapter
from fakevllm_adapters.formats.responses.input import with_history
from fakevllm_adapters.formats.responses.items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    logprobs_of,
    new_id,
    output_items,
)
from fakevllm_adapters.formats.responses.refusals import unknown_response
from fakevllm_adapters.formats.responses.request import (
    ResponsesRequest,
    chat_request,
    parse_request,
    request_tools,
)
from fakevllm_adapters.formats.responses.resource import Resource, usage_counts
from fakevllm_adapters.formats.responses.stream import Event, EventWriter, ItemStream
from fakevllm_adapters.formats.sse import DONE, parse_event
from fakevllm_adapters.formats.vllm_versions import dialect_of
from fakevllm_adapters.protocol.errors import internal_error

FAILED = "failed"
BLANK = b" "
"""A space that keeps the connection open, before the JSON of a response that is not streamed. Every
tested client skips the space."""


class ResponsesExchange:
    """A translator of one Responses request to chat completions, and of the response back."""

    def __init__(self, request: ResponsesRequest, body: Json, engine: EngineInfo) -> None:
        self._dialect = dialect_of(engine.version)
        tools = request_tools(request, self._dialect)
        self.body = chat_request(request, body, tools, self._dialect)
        self.streamed = bool(request.stream)
        self.response_id = request.request_id or new_id("resp_")
        self.on_response: Callable[[bytes], None] = _ignore
        """Callback that gets the complete response object as JSON. It is called before the app gets
        the last byte of the response. It is not called for a failed response, or if the request has
        `store: false`. It is assigned after construction, because only the caller of `open` knows
        where responses are stored."""
        self._is_stored = bool(request.store)
        model = engine.model or request.model or ""
        self._resource = Resource(
            self.response_id, int(time.time()), request, tools, engine, self._dialect, model
        )
        self._tools = tools
        self._with_logprobs = request.with_logprobs
        self._writer = EventWriter()
        self._waiting: list[bytes] = []
        self._items = ItemStream(self._dialect, tools)
        self._is_open, self._is_over = False, False
        self._has_choice = False
        self._finish_reason: str | None = None
        self._usage: Json = {}

    def answer(self, raw: bytes) -> bytes:
        completion: Any = orjson.loads(raw)
        try:
            self._resource.update_from(completion)
            resource = self._whole(completion["choices"][0], completion.get("usage") or {})
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"the answer is not a chat completion: {error!r}") from error
        self._store(resource)
        return _to_json(resource)

    def can_show(self, answer: Answer) -> bool:
        return True

    def event(self, event: bytes) -> bytes:
        try:
            self._take(event)
        except (AttributeError, LookupError, TypeError, ValueError):
            self._fail(internal_error().body)
        return self._written()

    def keep_alive(self) -> bytes:
        if not self.streamed:
            return BLANK
        if not self._is_over and not self._open():
            self._write([Event("response.in_progress", {"response": self._running()})])
        return self._written()

    def end_with_error(self, error: Json) -> bytes:
        """Return the events that end a failed stream. The last is `response.failed`, as in OpenAI's
        API.

        On this event, clients end the stream and show the error's message. vLLM instead closes the
        connection without such an event.
        """
        self._fail(error)
        return self._written()

    def _whole(self, choice: Json, usage: Json) -> Json:
        is_cut = self._is_cut(choice.get("finish_reason"), usage)
        logprobs = logprobs_of(choice) if self._with_logprobs else None
        items = output_items(choice["message"], logprobs, self._tools, self._dialect, is_cut)
        status = INCOMPLETE if is_cut else COMPLETED
        return self._resource.as_json(status, items, usage_counts(usage, self._dialect))

    def _take(self, event: bytes) -> None:
        chunk = parse_event(event)
        if self._is_over:
            return
        if chunk is None:
            if event.strip() == DONE.strip():
                self._end()
        elif "error" in chunk:
            self._fail(chunk)
        else:
            self._take_chunk(chunk)

    def _take_chunk(self, chunk: Json) -> None:
        self._resource.update_from(chunk)
        self._usage = chunk.get("usage") or self._usage
        self._open()
        choices: list[Json] = chunk.get("choices") or []
        for choice in choices:
            if choice.get("index", 0) == 0:
                self._has_choice = True
                logprobs = (logprobs_of(choice) or []) if self._with_logprobs else []
                self._write(self._items.take(cast(Json, choice.get("delta") or {}), logprobs))
                self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _open(self) -> bool:
        """Write the first two events of the stream if they have not been written yet.

        Return True if the events were written now.
        """
        if self._is_open:
            return False
        self._is_open = True
        running = {"response": self._running()}
        self._write([Event("response.created", running), Event("response.in_progress", running)])
        return True

    def _end(self) -> None:
        if not self._has_choice:
            return self._fail(internal_error().body)
        is_cut = self._is_cut(self._finish_reason, self._usage)
        usage = usage_counts(self._usage, self._dialect)
        self._write(self._items.close(is_cut))
        status = INCOMPLETE if is_cut else COMPLETED
        resource = self._resource.as_json(status, self._items.output, usage)
        kind = status if self._dialect.marks_incomplete else COMPLETED
        self._store(resource)
        self._write([Event(f"response.{kind}", {"response": resource})])
        self._is_over = True

    def _fail(self, error: Json) -> None:
        if self._is_over:
            return
        self._open()
        self._is_over = True
        resource = self._resource.as_json(FAILED, self._items.output, None)
        resource["error"] = _error(error)
        self._write([Event("response.failed", {"response": resource})])

    def _store(self, resource: Json) -> None:
        if self._is_stored:
            self.on_response(_to_json(resource))

    def _is_cut(self, finish_reason: object, usage: Json) -> bool:
        """Return True if the token limit cut off the answer.

        If the limit cuts off a tool call, old versions of vLLM report the finish_reason
        `tool_calls` instead of `length`. For such a version, the number of tokens decides: an
        answer that ends with `tool_calls` counts as cut off if it reaches the limit.
        """
        if finish_reason != "tool_calls" or self._dialect.marks_incomplete:
            return finish_reason == "length"
        limit = self._resource.max_output_tokens
        return limit is not None and (usage.get("completion_tokens") or 0) >= limit

    def _running(self) -> Json:
        return self._resource.as_json(IN_PROGRESS, [], None)

    def _write(self, events: Iterable[Event]) -> None:
        for event in events:
            self._waiting.append(self._writer.write(event))

    def _written(self) -> bytes:
        written = b"".join(self._waiting)
        self._waiting.clear()
        return written


class ResponsesAdapter(ChatAdapter):
    """The adapter (format translator) of OpenAI's Responses API."""

    name = "responses"
    path = "/v1/responses"
    has_previous_response = True

    def open(
        self, body: Json, engine: EngineInfo, earlier: History | None = None
    ) -> ResponsesExchange:
        request = parse_request(body)
        previous = request.previous_response_id
        if earlier is None and previous is not None:
            raise NotTranslated("previous_response_id", unknown_response(previous))
        if earlier:
            request.input = with_history(body, earlier)["input"]
        return ResponsesExchange(request, body, engine)


def _ignore(response: bytes) -> None:
    pass


def _to_json(resource: Json) -> bytes:
    # vLLM writes 1e-05 in responses that are not streamed; orjson would write 1e-5.
    return json.dumps(resource, ensure_ascii=False, separators=(",", ":")).encode()


def _error(body: Json) -> Json:
    """Return the `error` field of a failed response for an error body of vLLM.

    The error's code tells clients whether to retry. Codex, for example, retries unless the code
    says that the request was wrong.
    """
    content: Any = body.get("error")
    error = cast(Json, content) if isinstance(content, dict) else {"message": str(content)}
    status = error.get("code")
    code = "server_error"
    if isinstance(status, int) and 400 <= status < 500:
        code = "rate_limit_exceeded" if status == 429 else "invalid_prompt"
    return {"code": code, "message": str(error.get("message"))}
