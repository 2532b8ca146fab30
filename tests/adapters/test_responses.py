import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai._models import construct_type
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fakevllm_adapters.base import Engine, Json
from fakevllm_adapters.errors import error_body, internal_error
from fakevllm_adapters.responses import ResponsesAdapter, ResponsesExchange
from fakevllm_adapters.sse import DONE, KEEP_ALIVE, SseDecoder, encode, json_of

RESPONSES = ResponsesAdapter()
OLD, NEW = Engine("demo", 256, "0.27.1"), Engine("demo", 256)
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
"""vLLM 0.33.0's, with ids and times masked. 0.27.1 leaves the `_NEW_KEYS` away."""
_NEW_KEYS = re.compile(r'"(prompt_cache_\w+|safety_identifier)":null,|"cache_write_tokens":0,')


def masked(raw: bytes) -> str:
    text = re.sub(r'"((?:resp|msg|rs|fc)_)[0-9a-f]{16}"', r'"\1ID"', raw.decode())
    text = re.sub(r'"(id|item_id)":"[0-9a-f]{16}"', r'"\1":"ID"', text)
    return re.sub(r'"created_at":\d+', '"created_at":0', text)


def opened(engine: Engine = NEW, **fields: Any) -> ResponsesExchange:
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
    """The numbers and names of the events are checked."""
    events: list[Json] = []
    for number, event in enumerate(SseDecoder().feed(raw)):
        data = json_of(event)
        assert data is not None and data["sequence_number"] == number
        assert event.startswith(b"event: " + data["type"].encode() + b"\ndata: ")
        events.append(data)
    return events


def streamed(exchange: ResponsesExchange, chat: Sequence[bytes]) -> list[Json]:
    return events_of(b"".join(map(exchange.event, chat)))


def kinds(events: Sequence[Json]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


@BOTH
def test_a_whole_answer_is_vllms_key_by_key(engine: Engine) -> None:
    raw = opened(engine).answer(completion({"role": "assistant", "content": "Hello there"}))
    assert masked(raw) == (GOLDEN if engine is NEW else _NEW_KEYS.sub("", GOLDEN))


def test_reasoning_and_logprobs_are_written_as_vllm_does() -> None:
    token: Json = {"token": "H", "logprob": -0.00001, "bytes": [72]}
    logprobs = {"content": [token | {"top_logprobs": [token]}]}
    exchange = opened(include=["message.output_text.logprobs"], top_logprobs=1)
    message = {"role": "assistant", "reasoning": "hmm", "content": "H"}
    raw = exchange.answer(completion(message, logprobs=logprobs))
    assert (
        '"output":[{"id":"rs_ID","summary":[],"type":"reasoning","content":[{"text":"hmm",'
        '"type":"reasoning_text"}],"encrypted_content":null,"status":null},{"id":"msg_ID",'
        '"content":[{"annotations":[],"text":"H","type":"output_text","logprobs":[{"token":"H",'
        '"bytes":[72],"logprob":-1e-05,"top_logprobs":[{"token":"H","bytes":[72],'
        '"logprob":-1e-05}]}]}],"role":"assistant","status":"completed","type":"message",'
        '"phase":null}]' in masked(raw)
    )
    assert orjson.loads(raw)["top_logprobs"] == 1


def test_what_was_asked_is_repeated_as_vllm_understands_it() -> None:
    asked: Json = {
        "temperature": 0.001,
        "frequency_penalty": 1,
        "max_output_tokens": 7,
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "prompt_cache_retention": "in-memory",
        "tools": [LOOK],
        "tool_choice": {"type": "function", "name": "look"},
    }
    repeated = orjson.loads(opened(**asked).answer(completion({"content": "x"})))
    assert repeated["reasoning"] == {
        **{"context": None, "effort": "low", "generate_summary": None},
        **{"mode": None, "summary": None},
    }
    schema: Json = {"name": "n", "schema": {}, "type": "json_schema"}
    assert repeated["text"] == {
        "format": schema | {"description": None, "strict": None},
        "verbosity": None,
    }
    assert repeated["tool_choice"] == {"name": "look", "type": "function"}
    expected = {
        "temperature": 0.01,
        "frequency_penalty": 1.0,
        "max_output_tokens": 7,
        "metadata": {"a": "b"},
        "prompt_cache_retention": "in_memory",
    }
    assert {name: repeated[name] for name in expected} == expected


def test_greedy_sampling_has_no_top_p() -> None:
    raw = opened(temperature=0, top_p=0.5).answer(completion({"content": "x"}))
    assert orjson.loads(raw)["top_p"] == 1.0


CALLS: list[Json] = [
    {"id": f"chatcmpl-tool-{name}", "function": {"name": name, "arguments": '{"a": 1}'}}
    for name in ("look", "eye__see")
]
TOOLS = [
    LOOK,
    {
        "type": "namespace",
        "name": "eye",
        "description": "d",
        "tools": [{"type": "function", "name": "see"}],
    },
]


def test_calls_keep_the_upstreams_ids_and_go_back_to_their_namespaces() -> None:
    raw = opened(tools=TOOLS).answer(
        completion({"content": None, "tool_calls": CALLS}, "tool_calls")
    )
    items = orjson.loads(raw)["output"]
    assert [(item["call_id"], item["name"], item["namespace"]) for item in items] == [
        ("chatcmpl-tool-look", "look", None),
        ("chatcmpl-tool-eye__see", "see", "eye"),
    ]
    assert list(items[0]) == [
        *("arguments", "call_id", "name", "type", "id", "async", "caller", "namespace", "status")
    ]


def test_two_exchanges_have_two_ids_and_an_asked_one_is_used() -> None:
    assert re.fullmatch("resp_[0-9a-f]{16}", opened().response_id)
    assert opened().response_id != opened().response_id
    asked = opened(request_id="mine")
    assert orjson.loads(asked.answer(completion({"content": "x"})))["id"] == "mine"


def test_a_resolved_previous_response_is_still_named() -> None:
    body: Json = {"input": "b", "previous_response_id": "resp_1"}
    exchange = RESPONSES.open(body, NEW, [({"input": "a"}, {"content": "A"})])
    raw = exchange.answer(completion({"content": "x"}))
    assert orjson.loads(raw)["previous_response_id"] == "resp_1"


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b'{"choices":[]}', b'{"choices":[{}]}'])
def test_what_is_no_chat_completion_is_no_answer(raw: bytes) -> None:
    with pytest.raises(ValueError):
        opened().answer(raw)


NEW_STREAM = [
    '{"item":{"id":"msg_ID","content":[],"role":"assistant","status":"in_progress","type":"message",'
    '"phase":null},"output_index":0,"sequence_number":2,"type":"response.output_item.added"}',
    '{"content_index":0,"item_id":"msg_ID","output_index":0,"part":{"annotations":[],"text":"",'
    '"type":"output_text","logprobs":[]},"sequence_number":3,'
    '"type":"response.content_part.added"}',
    '{"content_index":0,"delta":"Hello","item_id":"msg_ID","logprobs":[],"output_index":0,'
    '"sequence_number":4,"type":"response.output_text.delta"}',
    '{"content_index":0,"delta":" there","item_id":"msg_ID","logprobs":[],"output_index":0,'
    '"sequence_number":5,"type":"response.output_text.delta"}',
    '{"content_index":0,"item_id":"msg_ID","logprobs":[],"output_index":0,"sequence_number":6,'
    '"text":"Hello there","type":"response.output_text.done"}',
    '{"content_index":0,"item_id":"msg_ID","output_index":0,"part":{"annotations":[],'
    '"text":"Hello there","type":"output_text","logprobs":null},"sequence_number":7,'
    '"type":"response.content_part.done"}',
    '{"item":{"id":"msg_ID","content":[{"annotations":[],"text":"Hello there",'
    '"type":"output_text","logprobs":null}],"role":"assistant","status":"completed",'
    '"type":"message","phase":null},"output_index":0,"sequence_number":8,'
    '"type":"response.output_item.done"}',
]
"""Between the resources; 0.27.1 writes the ids without prefix, and one key more at the end."""


@BOTH
def test_a_stream_is_vllms_event_by_event(engine: Engine) -> None:
    exchange = opened(engine, stream=True)
    chat = chat_stream([{"content": "Hello"}, {"content": " there"}])
    lines = masked(b"".join(map(exchange.event, chat))).split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    between, golden = "\n".join(NEW_STREAM), GOLDEN
    if engine is OLD:
        between = between.replace("msg_ID", "ID").replace(
            '"phase":null},"output_index":0,"sequence_number":8',
            '"phase":null,"summary":[]},"output_index":0,"sequence_number":8',
        )
        golden = _NEW_KEYS.sub("", GOLDEN)
    assert "\n".join(data[2:-1]) == between
    assert data[-1] == f'{{"response":{golden},"sequence_number":9,"type":"response.completed"}}'
    running = json.loads(golden) | {"output": [], "status": "in_progress", "usage": None}
    for number, kind in enumerate(("created", "in_progress")):
        first = {"response": running, "sequence_number": number, "type": f"response.{kind}"}
        assert data[number] == json.dumps(first, separators=(",", ":"))


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


@BOTH
def test_reasoning_text_and_each_call_have_events_of_their_own(engine: Engine) -> None:
    exchange = opened(engine, stream=True, tools=TOOLS)
    events = streamed(exchange, chat_stream(MIXED, "tool_calls"))
    part = "content_part" if engine is NEW else "reasoning_part"
    call = ["output_item.added", "function_call_arguments.delta"]
    done = ["function_call_arguments.done", "output_item.done"]
    assert kinds(events) == [
        *("created", "in_progress", "output_item.added", f"{part}.added"),
        *("reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", f"{part}.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *(*call, "function_call_arguments.delta", *done),
        *(*call, *done, "completed"),
    ]
    finished = [event["item"] for event in events if event["type"].endswith("output_item.done")]
    assert [item["type"] for item in finished] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert finished[0]["content"][0]["text"] == "hmm"
    assert finished[1]["content"][0]["text"] == "I look"
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in finished[2:]]
    assert calls == [
        ("chatcmpl-tool-look", "look", '{"a": 1}'),
        ("chatcmpl-tool-eye__see", "see", "{}"),
    ]
    assert [event.get("output_index") for event in events if "item" in event] == [
        *(0, 0, 1, 1, 2, 2, 3, 3)
    ]


@BOTH
def test_a_call_without_arguments_is_closed_as_vllm_closes_it(engine: Engine) -> None:
    exchange = opened(engine, stream=True, tools=TOOLS)
    events = streamed(exchange, chat_stream([call_delta(0, "look", "")], "tool_calls"))
    assert ("function_call_arguments.done" in kinds(events)) == (engine is NEW)


@BOTH
def test_an_answer_cut_by_its_limit_is_incomplete(engine: Engine) -> None:
    exchange = opened(engine, stream=True)
    *_, item, last = streamed(exchange, chat_stream([{"content": "Hel"}], "length"))
    resource = last["response"]
    assert resource["status"] == "incomplete"
    assert resource["incomplete_details"] == {"reason": "max_output_tokens"}
    expected = ("response.incomplete", "incomplete") if engine is NEW else ()
    assert (last["type"], item["item"]["status"]) == (
        expected or ("response.completed", "completed")
    )


def test_a_call_cut_by_its_limit_is_known_where_the_finish_reason_hides_it() -> None:
    asked: Json = {"tools": TOOLS, "max_output_tokens": 8}
    message = {"content": None, "tool_calls": CALLS[:1]}
    raw = completion(message, "tool_calls")
    assert orjson.loads(opened(OLD, **asked).answer(raw))["status"] == "incomplete"
    assert orjson.loads(opened(NEW, **asked).answer(raw))["status"] == "completed"


def test_streamed_logprobs_come_with_their_text() -> None:
    token: Json = {"token": "H", "logprob": -0.5, "bytes": [72]}
    logprobs = {"content": [token | {"top_logprobs": [token]}]}
    asked: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "stream": True}
    chat = [ROLE, chunk({"content": "H"}, logprobs=logprobs), chunk({}, "stop"), DONE]
    events = streamed(opened(**asked), chat)
    delta = next(event for event in events if event["type"].endswith("text.delta"))
    short = {"token": "H", "logprob": -0.5}
    assert delta["logprobs"] == [short | {"top_logprobs": [short]}]
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert [each["bytes"] for each in part["logprobs"]] == [[72]]


def test_the_room_that_is_left_is_told_from_the_first_chunk_on() -> None:
    created, *_ = streamed(opened(stream=True), [ROLE])
    assert created["response"]["max_output_tokens"] == 245
    created, *_ = streamed(opened(stream=True, max_output_tokens=999), [ROLE])
    assert created["response"]["max_output_tokens"] == 245


def test_keep_alives_are_events_and_the_opening_ones_come_once() -> None:
    exchange = opened(stream=True)
    raw = exchange.keep_alive() + exchange.keep_alive()
    raw += b"".join(map(exchange.event, [KEEP_ALIVE, ROLE, chunk({"content": "H"})]))
    raw += exchange.keep_alive()
    raw += b"".join(map(exchange.event, chat_stream([])[1:]))
    assert exchange.keep_alive() == b""
    assert kinds(events_of(raw)) == [
        *("created", "in_progress", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "in_progress", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]


def test_a_whole_answer_is_kept_waiting_with_blanks() -> None:
    exchange = opened()
    raw = exchange.keep_alive() + exchange.answer(completion({"content": "x"}))
    assert raw.startswith(b" {") and orjson.loads(raw)["status"] == "completed"


ENDS: list[tuple[list[bytes], str]] = [
    ([encode(internal_error().body), DONE], "server_error"),
    ([encode(error_body("too many logprobs", "BadRequestError", 400)), DONE], "invalid_prompt"),
    ([encode(error_body("slow down", "x", 429)), DONE], "rate_limit_exceeded"),
    ([encode({"error": "boom"})], "server_error"),
    ([DONE], "server_error"),
    ([b"data: {\n\n"], "server_error"),
    ([encode({"choices": 3})], "server_error"),
    ([encode({"choices": [{"delta": {"content": 3}}]})], "server_error"),
]


@pytest.mark.parametrize(("ends", "code"), ENDS)
@pytest.mark.parametrize("begins", [[], [ROLE, chunk({"content": "Hel"})]], ids=["first", "later"])
def test_a_stream_that_cannot_go_on_fails_once_and_says_why(
    begins: list[bytes], ends: list[bytes], code: str
) -> None:
    events = streamed(opened(stream=True), begins + ends)
    assert kinds(events)[:2] == ["created", "in_progress"]
    assert kinds(events).count("failed") == 1 and kinds(events)[-1] == "failed"
    resource = events[-1]["response"]
    assert (resource["status"], resource["error"]["code"]) == ("failed", code)
    assert isinstance(resource["error"]["message"], str)


def test_nothing_follows_the_end() -> None:
    exchange = opened(stream=True)
    streamed(exchange, chat_stream([{"content": "x"}]))
    assert exchange.event(ROLE) == exchange.event(DONE) == b""
    assert exchange.broken(internal_error().body) == b""


def test_a_stream_without_a_usage_ends_with_its_done() -> None:
    events = streamed(opened(stream=True), [ROLE, chunk({"content": "x"}, "stop"), DONE])
    assert kinds(events)[-1] == "completed"


EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def accumulated(events: Sequence[Json]) -> Response:
    """By the openai SDK's own helper."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    typed = [cast(Any, construct_type(type_=ResponseStreamEvent, value=event)) for event in events]
    return cast(Any, [each for event in typed for each in state.handle_event(event)][-1]).response


@BOTH
def test_the_openai_sdk_puts_a_stream_together(engine: Engine) -> None:
    exchange = opened(engine, stream=True, tools=TOOLS)
    events = streamed(exchange, chat_stream(MIXED, "tool_calls"))
    if engine is NEW:  # the SDK is stricter than vLLM's old dialect, but does not insist
        for event in events:
            EVENT.validate_python(event)
    response = accumulated(events)
    assert response.output_text == "I look"
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.call_id, call.arguments) for call in calls] == [
        ("chatcmpl-tool-look", '{"a": 1}'),
        ("chatcmpl-tool-eye__see", "{}"),
    ]
    assert response.usage is not None and response.usage.total_tokens == 19


def test_the_openai_sdk_takes_a_failure_and_a_whole_answer() -> None:
    failed = accumulated(streamed(opened(stream=True), [ROLE, encode(internal_error().body)]))
    assert failed.error is not None and failed.error.message == "Internal server error"
    raw = opened().answer(completion({"content": "Hello there"}))
    assert Response.model_validate_json(raw).output_text == "Hello there"


PIECES = st.lists(st.text(min_size=1, max_size=4), max_size=4)


@given(PIECES, PIECES, st.lists(PIECES, max_size=3), st.sampled_from(["stop", "length"]))
def test_however_an_answer_is_cut_its_items_are_those_of_the_whole(
    reasoning: list[str], text: list[str], calls: list[list[str]], finish: str
) -> None:
    deltas: list[Json] = [{"reasoning": piece} for piece in reasoning]
    deltas += [{"content": piece} for piece in text]
    for index, pieces in enumerate(calls):
        deltas.append(call_delta(index, f"f{index}", ""))
        deltas += [call_delta(index, None, piece) for piece in pieces]
    message: Json = {"reasoning": "".join(reasoning), "content": "".join(text)}
    message["tool_calls"] = [
        {
            "id": f"chatcmpl-tool-f{index}",
            "function": {"name": f"f{index}", "arguments": "".join(pieces)},
        }
        for index, pieces in enumerate(calls)
    ]
    events = streamed(opened(stream=True), chat_stream(deltas, finish))
    whole = orjson.loads(opened().answer(completion(message, finish)))
    assert list(map(known, events[-1]["response"]["output"])) == list(map(known, whole["output"]))
    grouped = itertools.groupby(event["output_index"] for event in events if "item" in event)
    assert [index for index, _ in grouped] == list(range(len(whole["output"])))


def known(item: Json) -> Json:
    """Without what a stream tells otherwise, as vLLM does: ids, and reasoning's status."""
    left = {"id"} | ({"status"} if item["type"] == "reasoning" else set[str]())
    return {key: value for key, value in item.items() if key not in left}


KEYS = st.sampled_from(
    [
        *("choices", "usage", "model", "delta", "message", "content", "reasoning", "tool_calls"),
        *("function", "name", "arguments", "id", "index", "finish_reason", "logprobs", "token"),
        *("prompt_tokens", "completion_tokens", "top_logprobs", "logprob", "error", "code"),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
ODD: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5)
)
ODD_CHUNKS = st.fixed_dictionaries({"choices": st.lists(ODD, max_size=2)}, optional={"usage": ODD})


@given(st.lists(ODD_CHUNKS.map(encode) | ODD.map(encode) | st.binary(max_size=9), max_size=4))
def test_an_odd_stream_ends_in_one_last_event(chat: list[bytes]) -> None:
    asked: Json = {"include": ["message.output_text.logprobs"], "stream": True}
    events = streamed(opened(**asked), [*chat, DONE])
    last = {"completed", "incomplete", "failed"}
    assert [kind in last for kind in kinds(events)] == [False] * (len(events) - 1) + [True]


@given(ODD | st.fixed_dictionaries({"choices": st.lists(ODD, min_size=1)}))
def test_an_odd_answer_is_read_or_refused(odd: Any) -> None:
    try:
        raw = opened().answer(orjson.dumps(odd))
    except ValueError:
        return
    assert orjson.loads(raw)["object"] == "response"
