"""Exchanges of the Responses format and chat answers for them, for the tests of that format."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
import pytest

from fakevllm_adapters.formats.base import EngineInfo, Json
from fakevllm_adapters.formats.responses.adapter import ResponsesAdapter, ResponsesExchange
from fakevllm_adapters.formats.sse import DONE, SseDecoder, encode, parse_event

RESPONSES = ResponsesAdapter()
OLD, NEW = EngineInfo("demo", 256, "0.27.1"), EngineInfo("demo", 256)
BOTH = pytest.mark.parametrize("engine", [OLD, NEW], ids=["old", "new"])
LOOK: Json = {"type": "function", "name": "look"}
USAGE: Json = {"prompt_tokens": 11, "total_tokens": 19, "completion_tokens": 8}

GOLDEN = (
    '{"id":"resp_ID","created_at":0,"incomplete_details":null,"instructions":null,"metadata":null,'
    '"model":"demo","object":"response","output":[{"id":"msg_ID","content":[{"annotations":[],'
    '"text":"Hello there","type":"output_text","logprobs":null}],"role":"assistant",'
    '"status":"completed","type":"message","phase":null}],"parallel_tool_calls":true,'
    '"temperature":1.0,"tool_choice":"none","tools":[],"top_p":1.0,"background":false,'
    '"max_output_tokens":245,"max_tool_calls":null,"previous_response_id":null,"prompt":null,'
    '"prompt_cache_options":null,"prompt_cache_key":null,"prompt_cache_retention":null,'
    '"reasoning":null,"safety_identifier":null,"service_tier":"auto","status":"completed",'
    '"text":null,"top_logprobs":null,"truncation":"disabled","usage":{"input_tokens":11,'
    '"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0,"input_tokens_per_turn":[],'
    '"cached_tokens_per_turn":[]},"output_tokens":8,"output_tokens_details":{"reasoning_tokens":0,'
    '"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]},'
    '"total_tokens":19},"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,'
    '"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,'
    '"output_messages":null}'
)
"""A response of vLLM 0.33.0 with masked ids and times. 0.27.1 omits the `NEW_KEYS`."""
NEW_KEYS = re.compile(r'"(prompt_cache_\w+|safety_identifier)":null,|"cache_write_tokens":0,')


def masked(raw: bytes) -> str:
    text = re.sub(r'"((?:resp|msg|rs|fc)_)[0-9a-f]{16}"', r'"\1ID"', raw.decode())
    text = re.sub(r'"(id|item_id)":"[0-9a-f]{16}"', r'"\1":"ID"', text)
    return re.sub(r'"created_at":\d+', '"created_at":0', text)


def opened(engine: EngineInfo = NEW, **fields: Any) -> ResponsesExchange:
    return RESPONSES.open({"input": "hi", **fields}, engine)


def completion(message: Json, finish: str = "stop", **choice: Any) -> bytes:
    chosen = {"index": 0, "message": message, "finish_reason": finish, **choice}
    return orjson.dumps({"model": "demo", "choices": [chosen], "usage": USAGE})


def chunk(delta: Json, finish: str | None = None, **choice: Any) -> bytes:
    chosen = {"index": 0, "delta": delta, "finish_reason": finish, **choice}
    usage = {"prompt_tokens": 11, "total_tokens": 11, "completion_tokens": 0}
    return encode({"model": "demo", "choices": [chosen], "usage": usage})


ROLE = chunk({"role": "assistant", "content": ""})


def chat_stream(deltas: Iterable[Json], finish: str = "stop") -> list[bytes]:
    last = encode({"model": "demo", "choices": [], "usage": USAGE})
    return [ROLE, *map(chunk, deltas), chunk({}, finish), last, DONE]


def events_of(raw: bytes) -> list[Json]:
    """Parse the events of a stream, and check their numbers and names."""
    events: list[Json] = []
    for number, event in enumerate(SseDecoder().feed(raw)):
        data = parse_event(event)
        assert data is not None and data["sequence_number"] == number
        assert event.startswith(b"event: " + data["type"].encode() + b"\ndata: ")
        events.append(data)
    return events


def streamed(exchange: ResponsesExchange, chat: Sequence[bytes]) -> list[Json]:
    return events_of(b"".join(map(exchange.event, chat)))


def kinds(events: Sequence[Json]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


TOOLS = [
    LOOK,
    {
        "type": "namespace",
        "name": "eye",
        "description": "d",
        "tools": [{"type": "function", "name": "see"}],
    },
]


def call_delta(index: int, name: str | None, arguments: str) -> Json:
    function: Json = {"arguments": arguments} | ({"name": name} if name else {})
    piece: Json = {"index": index, "function": function}
    return {"tool_calls": [piece | ({"id": f"chatcmpl-tool-{name}"} if name else {})]}


MIXED: list[Json] = [
    {"reasoning": "hm"},
    {"reasoning": "m", "content": "I"},
    {"content": " look"},
    call_delta(0, "look", ""),
    call_delta(0, None, '{"a":'),
    call_delta(0, None, " 1}"),
    call_delta(1, "eye__see", "{}"),
]


def text_item(role: str, *texts: str) -> Json:
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "content": parts}
