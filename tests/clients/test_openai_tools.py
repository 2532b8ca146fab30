"""Tests of chat completions with tools, with OpenAI's Python client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.clients.prompts import MODEL, SUNNY, user
from tests.clients.sessions import SESSION, Session
from tests.clients.tools import OSLO, RESULT, ROME, WEATHER, call

pytestmark = SESSION


def test_the_stream_helper_returns_parallel_tool_calls(
    client: openai.OpenAI, session: Session
) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user(call(OSLO, ROME)), tools=[WEATHER]
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    # The helper reports a call when the next call begins, or at the end of the stream.
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


def test_without_parallel_tool_calls_there_is_one_call(
    client: openai.OpenAI, session: Session
) -> None:
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
    (tool_call,) = message.tool_calls
    assert tool_call.type == "function"
    assert tool_call.function.name == "get_weather"
    assert isinstance(json.loads(tool_call.function.arguments)["city"], str)
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
    """Check the finish reason, and return names and arguments of the tool calls."""
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert all(call.type == "function" for call in calls)
    functions: list[Any] = [getattr(call, "function", None) for call in calls]
    return [(function.name, json.loads(function.arguments)) for function in functions]


def ids_of(*answers: ChatCompletion) -> set[str]:
    return {call.id for answer in answers for call in answer.choices[0].message.tool_calls or []}
