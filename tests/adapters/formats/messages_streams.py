"""Chunks of a chat stream and their translation to Messages events, for the tests."""

from typing import Any

from fakevllm_adapters.formats.base import EngineInfo, Exchange
from fakevllm_adapters.formats.sse import DONE, SseDecoder, encode, parse_event
from tests.adapters.formats.messages_bodies import MESSAGES, Json, body

USAGE: Json = {"prompt_tokens": 10, "total_tokens": 18, "completion_tokens": 8}


def opened(version: str | None = None) -> Exchange:
    return MESSAGES.open(body(stream=True), EngineInfo(version=version))


def chunk(delta: Json, finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return encode({"id": "chatcmpl-1", "model": "demo", "choices": [choice], **fields})


FIRST = chunk(
    {"role": "assistant", "content": ""}, usage=USAGE | {"total_tokens": 10, "completion_tokens": 0}
)
LAST = encode({"id": "chatcmpl-1", "model": "demo", "choices": [], "usage": USAGE})


def call(index: int, call_id: str | None = None, **function: str) -> Json:
    events_in: Json = {} if call_id is None else {"id": call_id, "type": "function"}
    return events_in | {"index": index, "function": function}


def calls(*pieces: Json) -> bytes:
    return chunk({"content": None, "tool_calls": list(pieces)})


def fed(*events: bytes, version: str | None = None) -> str:
    exchange = opened(version)
    return b"".join(map(exchange.event, events)).decode()


def whole(*middle: bytes, finish: str = "stop", version: str | None = None) -> str:
    return fed(FIRST, *middle, chunk({}, finish), LAST, DONE, version=version)


def events_in(stream: str) -> list[Json]:
    return [event for raw in SseDecoder().feed(stream.encode()) if (event := parse_event(raw))]


def kinds(stream: str) -> list[str]:
    """Return the kinds of block events: `start text 0`, `text_delta 0`, `stop 0`, …"""
    return [
        " ".join(
            str(part)
            for part in (
                event["type"].removeprefix("content_block_").replace("delta", ""),
                event.get("content_block", {}).get("type", ""),
                event.get("delta", {}).get("type", ""),
                event["index"],
            )
            if part != ""
        )
        for event in events_in(stream)
        if event["type"].startswith("content_block")
    ]
