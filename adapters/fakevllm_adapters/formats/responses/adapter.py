"""/v1/responses, as vLLM speaks it, over chat completions.

An answer's items keep the upstream's tool-call ids, so that a call is known by the same id in the
app's history and in ours.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, cast

import orjson

from fakevllm_adapters.formats.base import Answer, Earlier, Engine, Json, Untranslated
from fakevllm_adapters.formats.chat import ChatAdapter
from fakevllm_adapters.formats.responses.dialect import dialect_of
from fakevllm_adapters.formats.responses.input import with_history
from fakevllm_adapters.formats.responses.items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    items_of_message,
    logprobs_of,
    new_id,
)
from fakevllm_adapters.formats.responses.request import (
    ResponsesRequest,
    chat_request,
    parse_request,
    request_tools,
)
from fakevllm_adapters.formats.responses.resource import Resource, usage_of
from fakevllm_adapters.formats.responses.stream import Event, EventWriter, ItemStream
from fakevllm_adapters.formats.sse import DONE, json_of
from fakevllm_adapters.protocol.errors import WireError, error_body, internal_error

FAILED = "failed"
BLANK = b" "
"""Before the JSON of a whole answer, where every recorded client skips it."""


class ResponsesExchange:
    """One request at /v1/responses."""

    def __init__(self, asked: ResponsesRequest, body: Json, engine: Engine) -> None:
        self._dialect = dialect_of(engine.version)
        tools = request_tools(asked, self._dialect)
        self.body = chat_request(asked, body, tools, self._dialect)
        self.streamed = bool(asked.stream)
        self.response_id = asked.request_id or new_id("resp_")
        model = engine.model or asked.model or ""
        self._resource = Resource(
            self.response_id, int(time.time()), asked, tools, engine, self._dialect, model
        )
        self._tools = tools
        self._with_logprobs = asked.with_logprobs
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
            self._resource.note(completion)
            resource = self._whole(completion["choices"][0], completion.get("usage") or {})
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"the answer is no chat completion: {error!r}") from error
        # Numbers as vLLM writes them in whole answers: 1e-05, where orjson has 1e-5.
        return json.dumps(resource, ensure_ascii=False, separators=(",", ":")).encode()

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

    def broken(self, error: Json) -> bytes:
        """vLLM cuts the connection here, without a word. `response.failed` is what OpenAI sends:
        clients take it as the end, and show its message."""
        self._fail(error)
        return self._written()

    def _whole(self, choice: Json, usage: Json) -> Json:
        is_cut = self._is_cut(choice.get("finish_reason"), usage)
        logprobs = logprobs_of(choice) if self._with_logprobs else None
        items = items_of_message(choice["message"], logprobs, self._tools, self._dialect, is_cut)
        status = INCOMPLETE if is_cut else COMPLETED
        return self._resource.as_json(status, items, usage_of(usage, self._dialect))

    def _take(self, event: bytes) -> None:
        chunk = json_of(event)
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
        self._resource.note(chunk)
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
        """Whether this opened the stream."""
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
        usage = usage_of(self._usage, self._dialect)
        self._write(self._items.close(is_cut))
        status = INCOMPLETE if is_cut else COMPLETED
        resource = self._resource.as_json(status, self._items.output, usage)
        kind = status if self._dialect.tells_cut else COMPLETED
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

    def _is_cut(self, finish_reason: object, usage: Json) -> bool:
        """vLLM's old chat format says `tool_calls` even where the limit ended the call."""
        if finish_reason != "tool_calls" or self._dialect.tells_cut:
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
    name = "responses"
    path = "/v1/responses"
    names_answers = True

    def open(self, body: Json, engine: Engine, earlier: Earlier | None = None) -> ResponsesExchange:
        previous = body.get("previous_response_id")
        if earlier is None and previous is not None:
            raise _unknown_response(previous)
        asked = parse_request(body)
        if earlier:
            asked.input = with_history(body, earlier)["input"]
        return ResponsesExchange(asked, body, engine)


def _unknown_response(response_id: object) -> Untranslated:
    reason = Untranslated("previous_response_id")
    message = f"Response with id '{response_id}' not found."
    error = error_body(message, "invalid_request_error", 404, "response_id")
    reason.error = WireError(404, error)
    return reason


def _error(body: Json) -> Json:
    """As clients read it: Codex, for one, tries again unless the code says whose fault it was."""
    error: Any = body.get("error")
    told = cast(Json, error) if isinstance(error, dict) else {"message": str(error)}
    status = told.get("code")
    code = "server_error"
    if isinstance(status, int) and 400 <= status < 500:
        code = "rate_limit_exceeded" if status == 429 else "invalid_prompt"
    return {"code": code, "message": str(told.get("message"))}
