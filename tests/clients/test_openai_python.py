"""The official Python client, with its retries on: chat completions and completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.clients.sessions import (
    ADA,
    CITY,
    KEY,
    MODEL,
    RESULT,
    SESSION,
    SUNNY,
    Session,
    call,
    num_tokens,
    say,
)

pytestmark = SESSION

WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
OSLO = ("get_weather", {"city": "Oslo"})
ROME = ("get_weather", {"city": "Rome"})
HELLO = "Hello, wörld."


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture
def client(session: Session) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=session.base_url, api_key=KEY) as client:
        yield client


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_the_model_is_listed_and_can_be_looked_up(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == [MODEL]


def test_a_plain_answer_has_its_text_its_usage_and_its_reason(
    client: openai.OpenAI, session: Session
) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user(say(HELLO)), seed=1, temperature=0.2, user="u1"
    )
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (HELLO, "stop")
    assert choice.message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == num_tokens(HELLO), "of the served sibling only"
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    session.groups(1)


def test_an_answer_that_reaches_its_limit_says_so(client: openai.OpenAI, session: Session) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user(say(HELLO)), max_completion_tokens=5
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
        "Hello",
        "length",
    )
    session.groups(1)


def test_a_stream_is_one_answer_in_parts_with_usage_last(
    client: openai.OpenAI, session: Session
) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=user(say(HELLO)),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == HELLO
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == [
        "stop"
    ]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == num_tokens(HELLO)
    assert all(part.usage is None for part in parts)
    session.groups(1)


async def test_the_async_client_streams(session: Session) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=KEY) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=user(say(HELLO)), stream=True
        )
        texts = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
    assert "".join(texts) == HELLO
    session.groups(1)


def test_the_stream_helper_gathers_text(client: openai.OpenAI, session: Session) -> None:
    with client.chat.completions.stream(model=MODEL, messages=user(say(HELLO))) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == (HELLO, "stop")
    session.groups(1)


def test_the_stream_helper_gathers_parallel_tool_calls(
    client: openai.OpenAI, session: Session
) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user(call(OSLO, ROME)), tools=[WEATHER]
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    # The helper tells of a call when the next one begins, or at the end of the stream.
    assert [json.loads(event.arguments) for event in done] == [OSLO[1], ROME[1]]
    assert calls_of(final) == [OSLO, ROME]
    session.groups(1)


def test_tools_can_be_called_in_parallel_and_their_ids_are_unique(
    client: openai.OpenAI, session: Session
) -> None:
    answers = [
        client.chat.completions.create(
            model=MODEL, messages=user(call(OSLO, ROME)), tools=[WEATHER]
        )
        for _ in range(2)
    ]
    for answer in answers:
        assert calls_of(answer) == [OSLO, ROME]
        assert answer.choices[0].message.content is None
    assert len(ids_of(*answers)) == 4
    session.groups(2)


def test_one_call_without_parallel_ones(client: openai.OpenAI, session: Session) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user(call(OSLO)), tools=[WEATHER], parallel_tool_calls=False
    )
    assert calls_of(answer) == [OSLO]
    session.groups(1)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_forced_tool_is_called(client: openai.OpenAI, session: Session, choice: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=user(call(OSLO)),
        tools=[WEATHER],
        tool_choice=choice,
    )
    message = answer.choices[0].message
    assert message.tool_calls is not None
    (made,) = message.tool_calls
    assert made.type == "function"
    assert made.function.name == "get_weather"
    assert isinstance(json.loads(made.function.arguments)["city"], str)
    session.groups(1)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop_ends_with_an_answer(
    client: openai.OpenAI, session: Session, streamed: bool
) -> None:
    messages: list[Any] = user(call(OSLO, ROME))
    first = complete(client, messages, streamed)
    assert first.choices[0].finish_reason == "tool_calls"
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "tool_call_id": id, "content": RESULT} for id in sorted(ids_of(first))
    ]
    second = complete(client, messages, streamed)
    assert second.choices[0].message.content == SUNNY
    assert second.choices[0].finish_reason == "stop"
    session.groups(2)


def complete(client: openai.OpenAI, messages: Any, streamed: bool) -> ChatCompletion:
    if not streamed:
        return client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=[WEATHER]) as stream:
        return stream.get_final_completion()


def calls_of(answer: ChatCompletion) -> list[tuple[str, Any]]:
    """Names and arguments. The reason must say that there are any."""
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert all(call.type == "function" for call in calls)
    functions: list[Any] = [getattr(call, "function", None) for call in calls]
    return [(function.name, json.loads(function.arguments)) for function in functions]


def ids_of(*answers: ChatCompletion) -> set[str]:
    return {call.id for answer in answers for call in answer.choices[0].message.tool_calls or []}


def test_an_answer_is_parsed_by_its_schema(client: openai.OpenAI, session: Session) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=user(say(ADA)), response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    session.groups(1)


def test_a_parsed_stream_is_parsed_at_its_end(client: openai.OpenAI, session: Session) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user(say(ADA)), response_format=Person
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Ada", age=36)
    session.groups(1)


def test_several_choices_are_several_and_served_once(
    client: openai.OpenAI, session: Session
) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user(say(HELLO)), n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.message.content for choice in answer.choices] == [HELLO] * 2
    session.groups(1, siblings=1)


def test_log_probabilities_are_there_for_each_token(
    client: openai.OpenAI, session: Session
) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user(say(HELLO)), logprobs=True, top_logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == num_tokens(HELLO)
    assert [len(token.top_logprobs) for token in logprobs.content] == [1] * num_tokens(HELLO)
    session.groups(1)


def test_the_raw_answer_can_be_read_and_the_apps_request_id_comes_back(
    client: openai.OpenAI, session: Session
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=user(say(HELLO)), extra_headers={"X-Request-Id": "my-own-id"}
    )
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().id == "chatcmpl-my-own-id"
    session.groups(1)


@pytest.mark.parametrize("streamed", [False, True])
def test_completions_are_answered(client: openai.OpenAI, session: Session, streamed: bool) -> None:
    made: Any = client.completions.create(
        model=MODEL, prompt=say(HELLO), max_tokens=64, stream=streamed
    )
    parts = list(made) if streamed else [made]
    assert "".join(part.choices[0].text for part in parts) == HELLO
    assert parts[-1].choices[0].finish_reason == "stop"
    assert parts[0].object == "text_completion"
    assert parts[0].id.startswith("cmpl-")
    session.groups(1)


def test_a_request_that_is_wrong_is_refused_once_in_the_clients_own_types(
    client: openai.OpenAI, session: Session
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=user("hi"), temperature=-1)
    assert refused.value.body == {
        "message": "temperature must be non-negative, got -1.0. "
        "(parameter=temperature, value=-1.0)",
        "type": "BadRequestError",
        "param": "temperature",
        "code": 400,
    }
    session.refused(400)


def test_a_model_that_is_not_there_is_not_found_in_either_mode(
    client: openai.OpenAI, session: Session
) -> None:
    for streamed in (False, True):
        with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
            client.chat.completions.create(model="other", messages=user("hi"), stream=streamed)
    session.refused(404, 404)


def test_a_path_that_is_not_there_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="hi")
