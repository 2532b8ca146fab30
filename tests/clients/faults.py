"""The table of the model server's faults, with the outcome that the app must get.

A fault is produced for streamed and plain requests, in the format of the upstream request. This
module depends on neither clients nor proxies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from fakevllm_adapters.formats import chat
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.formats.sse import DONE as DONE_BYTES
from fakevllm_adapters.formats.sse import encode
from fakevllm_adapters.protocol.errors import error_body

Json = dict[str, Any]
Play = Callable[[web.Request], Awaitable[web.StreamResponse]]
Event = Callable[[str], bytes]
"""A function from the request's path to the event's bytes."""

TEXT = "All is well."
SILENCE = "silence"
SILENCE_S = web.RequestKey("SILENCE_S", float)
"""Key under which a request stores the duration of a silence, in seconds. The silence is longer
than the client's timeout."""

WELL = 200
"""The app gets the answer after one request."""
TROUBLE = 0
"""The app gets an error that it may retry: a status of 5xx, or an error inside the stream."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and its expected outcome: WELL, TROUBLE, or the status that the app gets.

    `streamed` is None if a stream cannot have this fault. `whole` is None if a plain response
    cannot have it.
    """

    streamed: Play | None
    whole: Play | None
    outcome: int
    outcome_whole: int | None = None
    """Outcome of a plain request, if it differs."""

    def play(self, streamed: bool) -> Play | None:
        return self.streamed if streamed else self.whole

    def expected_outcome(self, streamed: bool) -> int:
        return self.outcome if streamed or self.outcome_whole is None else self.outcome_whole


def _named(path: str, choices: Sequence[Json], ending: str = "", **more: Any) -> Json:
    kind = "chat.completion" + ending if path == chat.PATH else "text_completion"
    named = {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "fake"}
    return {**named, "choices": choices, **more}


def _chunk(delta: Json, finish_reason: str | None = None) -> Event:
    def event(path: str) -> bytes:
        content = {"delta": delta} if path == chat.PATH else {"text": delta.get("content", "")}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        return encode(_named(path, [choice], ".chunk"))

    return event


def _bytes(event: bytes) -> Event:
    return lambda _: event


REFUSALS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailable",
}


def _error(status: int) -> Json:
    return error_body(f"The engine says {status}.", REFUSALS[status], status)


USAGE = {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3}
ROLE = _chunk({"role": "assistant", "content": ""})
HALF, REST = _chunk({"content": TEXT[:6]}), _chunk({"content": TEXT[6:]})
STOP = _chunk({}, "stop")
DONE = _bytes(DONE_BYTES)
DIED = _bytes(encode(_error(500)))
REFUSED = _bytes(encode(_error(400)))


def COUNTED(path: str) -> bytes:
    return encode(_named(path, [], ".chunk", usage=USAGE))


def NO_CHOICE(path: str) -> bytes:
    return encode(_named(path, [], ".chunk"))


def _streams(*events: Event | str, drops: bool = False) -> Play:
    async def play(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for event in events:
            if callable(event):
                await answer.write(event(request.path))
            else:
                await asyncio.sleep(request[SILENCE_S])
        if drops:
            _drop(request)
        return answer

    return play


def _drop(request: web.Request) -> None:
    """Abort the connection, as the kernel does for a killed process."""
    if request.transport is not None:
        request.transport.abort()


def _whole(path: str, **changes: Any) -> Json:
    """Return an answer in which fields of the answer, or fields of its choice, are changed."""
    content: Json = {"text": TEXT}
    if path == chat.PATH:
        content = {"message": {"role": "assistant", "content": TEXT}}
    answer = _named(path, [{"index": 0, **content, "finish_reason": "stop"}], usage=USAGE)
    for name, value in changes.items():
        (answer if name in answer else answer["choices"][0])[name] = value
    return answer


def _answers(**changes: Any) -> Play:
    async def play(request: web.Request) -> web.StreamResponse:
        return web.json_response(_whole(request.path, **changes))

    return play


def _says(body: bytes | Json) -> Play:
    async def play(request: web.Request) -> web.StreamResponse:
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        return web.Response(body=raw, content_type="application/json")

    return play


def _half(*, rests: bool = False, drops: bool = False) -> Play:
    """Send the first half of an answer. With `rests`, send the second half after a silence."""

    async def play(request: web.Request) -> web.StreamResponse:
        body = orjson.dumps(_whole(request.path))
        is_cut = not rests and not drops
        middle = len(body) // 2
        headers = {"Content-Type": "application/json"}
        answer = web.StreamResponse(headers=headers)
        answer.content_length = middle if is_cut else len(body)
        await answer.prepare(request)
        await answer.write(body[:middle])
        if rests:
            await asyncio.sleep(request[SILENCE_S])
            await answer.write(body[middle:])
        elif drops:
            _drop(request)
        return answer

    return play


def _refuses(status: int) -> Play:
    async def play(request: web.Request) -> web.StreamResponse:
        adapter = next(adapter for adapter in ADAPTERS.values() if adapter.path == request.path)
        body = adapter.refusal(status, _error(status))
        soon = {"Retry-After": "1"} if status in (429, 503) else {}
        return web.json_response(body, status=status, headers=soon)

    return play


def _later(play: Play) -> Play:
    async def late(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(request[SILENCE_S])
        return await play(request)

    return late


def _gone() -> Play:
    async def play(request: web.Request) -> web.StreamResponse:
        _drop(request)
        return web.Response()

    return play


_ALL = (ROLE, HALF, REST, STOP, COUNTED, DONE)

FAULTS: dict[str, Fault] = {
    "none": Fault(_streams(*_ALL), _answers(), WELL),
    "silent at first": Fault(_later(_streams(*_ALL)), _later(_answers()), WELL),
    "silent in the middle": Fault(
        _streams(ROLE, HALF, SILENCE, REST, STOP, COUNTED, DONE), _half(rests=True), WELL
    ),
    "no [DONE]": Fault(_streams(ROLE, HALF, REST, STOP, COUNTED), None, WELL),
    "no finish_reason": Fault(_streams(ROLE, HALF, REST, COUNTED, DONE), None, WELL),
    "no role": Fault(_streams(HALF, REST, STOP, COUNTED, DONE), None, WELL),
    "no usage": Fault(_streams(ROLE, HALF, REST, STOP, DONE), _answers(usage=None), WELL),
    "chunks without a choice": Fault(
        _streams(NO_CHOICE, ROLE, HALF, NO_CHOICE, REST, STOP, COUNTED, DONE), None, WELL
    ),
    "comments": Fault(_streams(_bytes(b": ping\n\n"), *_ALL), None, WELL),
    "cut": Fault(_streams(ROLE, HALF), _half(), TROUBLE),
    "cut before the text": Fault(_streams(ROLE), _says(b"{"), TROUBLE),
    "empty": Fault(_streams(), _says(b""), TROUBLE),
    "dropped": Fault(_streams(ROLE, HALF, drops=True), _half(drops=True), TROUBLE),
    "dropped at once": Fault(_gone(), _gone(), TROUBLE),
    "no choice": Fault(_streams(NO_CHOICE, COUNTED, DONE), _answers(choices=[]), TROUBLE),
    "not JSON": Fault(_streams(ROLE, _bytes(b"data: {bad\n\n"), DONE), _says(b"{bad}"), TROUBLE),
    "an empty event": Fault(_streams(ROLE, _bytes(b"data: \n\n"), *_ALL[1:]), None, TROUBLE),
    "an error in the middle": Fault(_streams(ROLE, HALF, DIED, DONE), _says(_error(500)), TROUBLE),
    "a refusal in the middle": Fault(_streams(ROLE, HALF, REFUSED, DONE), None, TROUBLE),
    "an error first": Fault(_streams(DIED, DONE), None, TROUBLE),
    "a late error": Fault(_later(_refuses(500)), _later(_refuses(500)), TROUBLE),
    "a refusal first": Fault(_streams(REFUSED, DONE), None, 400),
    "the other mode": Fault(_answers(), _streams(*_ALL), 400),
    **{str(status): Fault(_refuses(status), _refuses(status), status) for status in REFUSALS},
}


def _calls(*ids: str, finish_reason: str = "tool_calls", indexed: bool = True) -> Fault:
    """Call the weather tool, with one call per id, and answer the request that has the results."""
    calls: list[Json] = [
        {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": city}}
        for name, city in zip(ids, ('{"city": "Oslo"}', '{"city": "Rome"}'), strict=False)
    ]
    placed = [call | {"index": at} if indexed else call for at, call in enumerate(calls)]
    streamed = _streams(
        ROLE, _chunk({"tool_calls": placed}), _chunk({}, finish_reason), COUNTED, DONE
    )
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    whole = _answers(message=message, finish_reason=finish_reason)
    return Fault(_first(streamed, _streams(*_ALL)), _first(whole, _answers()), WELL)


def _first(call: Play, answer: Play) -> Play:
    async def play(request: web.Request) -> web.StreamResponse:
        messages = (await request.json())["messages"]
        return await (answer if messages[-1]["role"] == "tool" else call)(request)

    return play


SAME_ID = "the same id for both calls"
TOOL_FAULTS = {
    "different ids for the calls": _calls("call_1", "call_2"),
    SAME_ID: _calls("call_1", "call_1"),
    "the finish reason stop with a call": _calls("call_1", finish_reason="stop"),
}
