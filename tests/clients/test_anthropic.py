"""Tests with Anthropic's official Python client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.prompts import KEY, MODEL, SUNNY, num_tokens, say
from tests.clients.sessions import SESSION, Session, library
from tests.clients.tools import CITY, OSLO, RESULT, ROME, call

pytestmark = SESSION

WEATHER = {"name": "get_weather", "description": "Weather of a city", "input_schema": CITY}


@pytest.fixture(params=["api_key", "auth_token"])
def client(request: pytest.FixtureRequest, session: Session) -> Iterator[Any]:
    """Clients that send the key in one of its two headers."""
    keys = {"api_key": None, "auth_token": None, request.param: KEY}
    with library("anthropic").Anthropic(base_url=session.url, **keys) as client:
        yield client


def request_fields(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "max_tokens": 512, "messages": messages, **fields}


def test_a_plain_answer_has_its_text_its_usage_and_its_reason(
    client: Any, session: Session
) -> None:
    answer = client.messages.create(
        **request_fields(say(SUNNY), system="Be nice.", extra_body={"temperature": 0.5})
    )
    (block,) = answer.content
    assert (block.type, block.text) == ("text", SUNNY)
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", MODEL)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == num_tokens(SUNNY), "of the served sibling only"
    assert answer.usage.input_tokens > 0
    (group,) = session.groups(1)
    assert group["route"] == "/v1/messages"


def test_a_raw_stream_has_its_events_in_order(client: Any, session: Session) -> None:
    events = list(client.messages.create(**request_fields(say(SUNNY)), stream=True))
    kinds = [event.type for event in events if event.type != "ping"]
    deltas = kinds[2:-3]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(deltas) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    texts = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(texts) == SUNNY
    session.groups(1)


def test_the_stream_helper_returns_text_and_usage(client: Any, session: Session) -> None:
    with client.messages.stream(**request_fields(say(SUNNY))) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == SUNNY == final.content[0].text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == num_tokens(SUNNY)
    assert final.usage.input_tokens > 0
    session.groups(1)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop_ends_with_an_answer(client: Any, session: Session, streamed: bool) -> None:
    question = request_fields(call(OSLO, ROME), tools=[WEATHER])
    first = complete(client, question, streamed)
    calls = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use"
    assert [(tool_call.name, tool_call.input) for tool_call in calls] == [OSLO, ROME]
    assert len({tool_call.id for tool_call in calls}) == 2
    results = [
        {"type": "tool_result", "tool_use_id": tool_call.id, "content": RESULT}
        for tool_call in calls
    ]
    question["messages"] += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": results},
    ]
    second = complete(client, question, streamed)
    assert [block.text for block in second.content] == [SUNNY]
    assert second.stop_reason == "end_turn"
    session.groups(2)


def complete(client: Any, question: dict[str, Any], streamed: bool) -> Any:
    if not streamed:
        return client.messages.create(**question)
    with client.messages.stream(**question) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"type": "any"}, "tool_use"),
        (
            {"type": "tool", "name": "get_weather"},
            "end_turn",
        ),  # as in vLLM; Anthropic sends another reason
    ],
)
def test_a_forced_tool_is_called(client: Any, session: Session, choice: Any, reason: str) -> None:
    answer = client.messages.create(
        **request_fields(call(OSLO), tools=[WEATHER], tool_choice=choice)
    )
    (block,) = answer.content
    assert (block.type, block.name, block.input) == ("tool_use", *OSLO)
    assert answer.stop_reason == reason
    session.groups(1)


def test_an_answer_ended_by_a_limit_or_a_stop_sequence_has_that_reason(
    client: Any, session: Session
) -> None:
    cut = client.messages.create(**request_fields(say(SUNNY), max_tokens=5))
    assert (cut.content[0].text, cut.stop_reason) == (SUNNY[:5], "max_tokens")
    stopped = client.messages.create(**request_fields(say(SUNNY), stop_sequences=["sunny"]))
    assert stopped.content[0].text == "It is "
    assert stopped.stop_reason == "end_turn", "vLLM does not name the sequence"
    session.groups(2)


def test_messages_with_several_content_blocks_are_accepted(client: Any, session: Session) -> None:
    question = request_fields(
        [
            {"type": "text", "text": "An instruction", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": say(SUNNY)},
        ],  # type: ignore[arg-type]
        system=[{"type": "text", "text": "Be nice.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "u1"},
    )
    assert client.messages.create(**question).content[0].text == SUNNY
    session.groups(1)


def test_counting_tokens_makes_no_group(client: Any, session: Session) -> None:
    question = request_fields(say(SUNNY))
    question.pop("max_tokens")
    counted = client.messages.count_tokens(**question)
    answer = client.messages.create(**request_fields(say(SUNNY)))
    assert counted.input_tokens == answer.usage.input_tokens
    session.groups(1)


def test_an_unknown_model_is_refused_with_and_without_streaming(
    client: Any, session: Session
) -> None:
    anthropic = library("anthropic")
    for streamed in (False, True):
        with pytest.raises(anthropic.NotFoundError, match="other") as refused:
            client.messages.create(**request_fields("hi") | {"model": "other"}, stream=streamed)
        assert refused.value.body["type"] == "error"
        assert refused.value.body["error"]["message"]
    session.refused(404, 404)


def test_an_invalid_request_is_refused_without_retries(client: Any, session: Session) -> None:
    with pytest.raises(library("anthropic").BadRequestError):
        client.messages.create(**request_fields("hi", extra_body={"temperature": -1}))
    session.refused(400)


async def test_the_async_client_streams(session: Session) -> None:
    async with (
        library("anthropic").AsyncAnthropic(base_url=session.url, api_key=KEY) as client,
        client.messages.stream(**request_fields(say(SUNNY))) as stream,
    ):
        text = "".join([part async for part in stream.text_stream])
    assert text == SUNNY
    session.groups(1)
