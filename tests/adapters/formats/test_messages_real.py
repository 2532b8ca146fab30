"""Comparison with vLLM's own translation and Anthropic's SDK, called without any server."""

import asyncio
import importlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakevllm_adapters.formats.base import EngineInfo, NotTranslated
from fakevllm_adapters.formats.messages.schema import MalformedBody
from fakevllm_adapters.formats.sse import DONE
from fakevllm_adapters.protocol.errors import schema_error
from tests.adapters.formats.messages_bodies import (
    COUNT,
    MESSAGES,
    PNG,
    TOOL,
    Json,
    body,
    result,
    text,
    user,
)
from tests.adapters.formats.messages_streams import FIRST, LAST, calls, chunk, events_in, fed, whole
from tests.adapters.formats.messages_streams import call as piece
from tests.adapters.formats.test_messages_answer import call, completion
from tests.adapters.formats.test_messages_fuzz import CONVERSATION, ODD_BODY
from tests.adapters.formats.test_messages_stream import CALLS, WORDS, answered, chunks

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
MANY = settings(max_examples=40, deadline=None, suppress_health_check=QUIET)


class Native:
    """vLLM's handler without an engine behind it."""

    def __init__(self) -> None:
        self.version: str = importlib.import_module("vllm").__version__
        self.schema = self._module("anthropic.protocol")
        self.chat = self._module("openai.chat_completion.protocol")
        self.tokenize = self._module("serve.tokenize.protocol")
        self._handler: Any = object.__new__(
            self._module("anthropic.serving").AnthropicServingMessages
        )
        names = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        self._handler.stop_reason_map = names

    def chat_request(self, request: Any) -> Json:
        convert: Any = getattr(self._handler, "_convert_anthropic_to_openai_request")  # noqa: B009
        return plain(convert(request, merge_inline_system=True))

    def stream(self, events: Sequence[bytes]) -> str:
        return masked(asyncio.run(self._stream(events)))

    def answer(self, raw: bytes) -> str:
        whole_answer = self.chat.ChatCompletionResponse.model_validate_json(raw)
        message: Json = self._handler.messages_full_converter(whole_answer).model_dump(
            exclude_none=True
        )
        return masked(orjson.dumps(message).decode())

    async def _stream(self, events: Sequence[bytes]) -> str:
        async def generator() -> AsyncIterator[str]:
            for event in events:
                yield event.decode()

        converted = self._handler.message_stream_converter(generator())
        return "".join([event async for event in converted])

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"vllm.entrypoints.{name}")


def plain(request: Any) -> Json:
    """Return a chat request as JSON. A token limit and a missing tool choice are always written in
    the same way."""
    dumped: Json = request.model_dump(mode="json")
    limit = dumped.pop("max_completion_tokens", None)
    dumped["max_tokens"] = dumped.get("max_tokens") if limit is None else limit
    for name in ("kv_transfer_params", "ec_transfer_params", "request_id"):
        dumped.pop(name, None)
    if not dumped.get("tools"):
        dumped |= {"tools": None, "tool_choice": "none"}
    return dumped


def masked(answer: str) -> str:
    return re.sub(r'"signature":"[0-9a-f]{32}"', '"signature":"S"', answer)


@pytest.fixture(scope="module")
def native() -> Native:
    return Native()


SYSTEM_TURN = st.sampled_from(
    [
        {"role": "system", "content": "now"},
        {"role": "system", "content": [text("a"), text("x-anthropic-billing-header: 1")]},
        user([PNG, result([PNG, text("b"), {"type": "tool_reference", "tool_name": "add"}])]),
        {"role": "assistant", "content": [result([text("b")])]},
        user([]),
        {"role": "assistant", "content": []},
    ]
)
TURNS = st.tuples(CONVERSATION, st.lists(SYSTEM_TURN, max_size=2), CONVERSATION).map(
    lambda parts: [*parts[0], *parts[1], *parts[2]]
)
CHOICES = st.sampled_from([None, "auto", "any", "none", "tool"])


@MANY
@given(TURNS, st.booleans(), CHOICES)
def test_a_conversation_is_translated_as_by_vllm(
    native: Native, turns: list[Json], stream: bool, choice: str | None
) -> None:
    tools: list[Json] = [TOOL, {"name": "now", "input_schema": {"properties": {}}, "strict": True}]
    request = body(messages=turns, stream=stream, tools=tools, top_k=3, stop_sequences=["x"])
    request["output_config"] = {"format": {"schema": {"type": "object"}}, "effort": "max"}
    if choice:
        request["tool_choice"] = {"type": choice, "name": "add", "disable_parallel_tool_use": True}
    wanted = native.schema.AnthropicMessagesRequest.model_validate(request)
    ours = native.chat.ChatCompletionRequest.model_validate(
        MESSAGES.open(request, EngineInfo()).body
    )
    assert plain(ours) == native.chat_request(wanted)


@MANY
@given(TURNS)
def test_a_count_of_tokens_has_the_same_messages_as_vllms(
    native: Native, turns: list[Json]
) -> None:
    request = body(messages=turns, tools=[TOOL], system="s")
    wanted = native.schema.AnthropicCountTokensRequest.model_validate(request)
    ours = native.tokenize.TokenizeChatRequest.model_validate(
        COUNT.open(request, EngineInfo()).body
    )
    told_by_vllm = native.chat_request(wanted)
    told_by_ours = ours.model_dump(mode="json")
    for name in ("messages", "tools", "model", "chat_template_kwargs", "add_generation_prompt"):
        assert told_by_ours[name] == told_by_vllm[name]


@MANY
@given(ODD_BODY)
def test_an_odd_body_is_accepted_or_refused_as_by_vllm(native: Native, odd: Json) -> None:
    problems = problems_of(native, odd)
    try:
        ours = MESSAGES.open(odd, EngineInfo()).body
    except MalformedBody as refused:
        assert refused.error is not None
        branches = r"\.(str|list\[[^']*?\]+)(?=[.'])"
        assert refused.error.message == re.sub(branches, "", schema_error(problems).message)
    except NotTranslated:
        assert not problems
    else:
        assert not problems
        verdicts_agree(native, odd, ours)


def problems_of(native: Native, odd: Json) -> list[Json]:
    invalid: Any = importlib.import_module("pydantic").ValidationError
    try:
        native.schema.AnthropicMessagesRequest.model_validate(odd)
    except invalid as error:
        return [dict(problem) for problem in error.errors(include_url=False)]
    return []


def verdicts_agree(native: Native, odd: Json, ours: Json) -> None:
    """Check that vLLM's translation and ours give equal chat requests, or that both fail."""
    failed: list[Exception] = []
    requests: list[Json] = []
    for ask in (
        lambda: native.chat_request(native.schema.AnthropicMessagesRequest.model_validate(odd)),
        lambda: plain(native.chat.ChatCompletionRequest.model_validate(ours)),
    ):
        try:
            requests.append(ask())
        except Exception as error:
            failed.append(error)
    assert len(requests) != 1, failed
    for request in requests:
        request["stop"] = request["stop"] or None  # none, in either spelling
    assert not requests or requests[0] == requests[1]


@MANY
@given(WORDS, WORDS, CALLS, st.sampled_from(["stop", "length", "tool_calls", "abort"]), st.data())
def test_a_stream_equals_vllms(
    native: Native, reasoning: str, words: str, inputs: list[Json], finish: str, data: st.DataObject
) -> None:
    uses = [orjson.dumps(arguments).decode() for arguments in inputs]
    middle = data.draw(st.permutations(chunks(reasoning, words, uses, data)))
    events = [FIRST, *middle, chunk({}, finish), LAST, DONE]
    assert masked(fed(*events, version=native.version)) == native.stream(events)


def test_a_stream_with_a_call_begun_within_another_equals_vllms(native: Native) -> None:
    events = [
        FIRST,
        calls(piece(0, "a", name="add", arguments="{"), piece(1, "b", name="now")),
        calls(piece(0, arguments="}"), piece(1, arguments="{}"), piece(2, arguments="x")),
        chunk({"content": "x", "reasoning": "y", "tool_calls": [piece(1, "b", arguments=" ")]}),
        chunk({}, "stop"),
        LAST,
        DONE,
    ]
    assert masked(fed(*events, version=native.version)) == native.stream(events)


MESSAGES_ANSWERED: list[Json] = [
    {"role": "assistant", "content": "Hello"},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": "Hi", "reasoning": "hm", "tool_calls": []},
    {"role": "assistant", "content": None, "tool_calls": [call('{"a": [1.5, "ä", null]}')]},
    {"role": "assistant", "content": "", "tool_calls": [call("{}"), call("{}", "t2")]},
]


@pytest.mark.parametrize("finish", ["stop", "length", "tool_calls", "abort"])
@pytest.mark.parametrize("message", MESSAGES_ANSWERED)
def test_an_answer_equals_vllms(native: Native, message: Json, finish: str) -> None:
    details: Json = {"cached_tokens": 3, "created_cache_tokens": None}
    usage = {"prompt_tokens": 10, "completion_tokens": 8, "prompt_tokens_details": details}
    for fields in ({}, {"usage": usage}):
        raw = completion(message, finish, **fields)
        ours = MESSAGES.open(body(), EngineInfo(version=native.version)).answer(raw).decode()
        assert masked(ours) == native.answer(raw)


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "7", "null"])
def test_a_call_that_vllm_cannot_translate_raises_value_error(
    native: Native, arguments: str
) -> None:
    raw = completion({"role": "assistant", "content": "x", "tool_calls": [call(arguments)]})
    if arguments != "null":
        with pytest.raises(ValueError, match=r"."):
            native.answer(raw)
    with pytest.raises(ValueError, match=r"."):
        MESSAGES.open(body(), EngineInfo()).answer(raw)


class Sdk:
    """The accumulator of the official SDK."""

    def __init__(self) -> None:
        self._lib: Any = importlib.import_module("anthropic.lib.streaming._messages")
        self._message: Any = importlib.import_module("anthropic.types").Message

    def added_up(self, stream: str) -> Json:
        snapshot: Any = None
        buffers: dict[int, bytes] = {}
        for event in events_in(stream):
            snapshot = self._lib.accumulate_event(
                event=event, current_snapshot=snapshot, json_bufs=buffers
            )
        return snapshot.to_dict()

    def read(self, answer: Json) -> Json:
        return self._message.model_validate(answer | {"stop_sequence": None}).to_dict()


@MANY
@given(WORDS, WORDS, CALLS, st.data())
def test_the_sdk_accumulates_a_stream_to_the_same_answer(
    reasoning: str, words: str, inputs: list[Json], data: st.DataObject
) -> None:
    uses = [orjson.dumps(arguments).decode() for arguments in inputs]
    sdk = Sdk()
    summed = sdk.added_up(whole(*chunks(reasoning, words, uses, data)))
    for block in summed["content"]:
        block.pop("signature", None)
    wanted = answered(reasoning, words, uses)
    assert {name: summed[name] for name in wanted} == wanted
