"""Tests of LangChain's ChatOpenAI and of a LangGraph agent."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.clients.prompts import ADA, KEY, MODEL, PERSON, SUNNY, num_tokens, say
from tests.clients.sessions import SESSION, Session, library
from tests.clients.tools import OSLO, RESULT, ROME, WEATHER, call

pytestmark = SESSION

PERSON_TITLED = {"title": "Person", "description": "A person.", **PERSON}


@pytest.fixture
def chat(session: Session) -> Any:
    return model(session)


def model(session: Session, **fields: Any) -> Any:
    openai = library("langchain_openai")
    return openai.ChatOpenAI(base_url=session.base_url, api_key=KEY, model=MODEL, **fields)


def test_a_plain_answer_has_its_text_and_its_usage(chat: Any, session: Session) -> None:
    answer = chat.invoke(say(SUNNY))
    assert answer.content == SUNNY
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] == num_tokens(SUNNY)
    session.groups(1)


async def test_a_streams_chunks_add_up_to_the_answer(chat: Any, session: Session) -> None:
    whole: Any = None
    async for chunk in chat.astream(say(SUNNY), stream_usage=True):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == SUNNY
    assert whole.usage_metadata["output_tokens"] == num_tokens(SUNNY)
    assert whole.response_metadata["finish_reason"] == "stop"
    session.groups(1)


def sum_of(chunks: Iterable[Any]) -> Any:
    """Return the sum of a stream's chunks."""
    whole: Any = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_are_called_in_parallel(chat: Any, session: Session, streamed: bool) -> None:
    bound = chat.bind_tools([WEATHER])
    prompt = call(OSLO, ROME)
    answer = sum_of(bound.stream(prompt)) if streamed else bound.invoke(prompt)
    assert [(tool_call["name"], tool_call["args"]) for tool_call in answer.tool_calls] == [
        OSLO,
        ROME,
    ]
    assert len({tool_call["id"] for tool_call in answer.tool_calls}) == 2
    assert answer.invalid_tool_calls == []
    session.groups(1)


@pytest.mark.parametrize(
    ("method", "prompt"),
    [
        ("json_schema", say(ADA)),
        ("json_mode", say(ADA)),
        ("function_calling", call(("Person", json.loads(ADA)))),
    ],
)
def test_an_answer_can_be_structured(chat: Any, session: Session, method: str, prompt: str) -> None:
    structured = chat.with_structured_output(PERSON_TITLED, method=method)
    assert structured.invoke(prompt) == {"name": "Ada", "age": 36}
    session.groups(1)


def test_an_agent_calls_its_tools_and_ends(chat: Any, session: Session) -> None:
    def get_weather(city: str) -> str:
        """Weather of a city"""
        cities.append(city)
        return RESULT

    cities: list[str] = []
    agent = library("langgraph.prebuilt").create_react_agent(chat, [get_weather])
    messages = agent.invoke({"messages": [("user", call(OSLO, ROME))]})["messages"]
    assert sorted(cities) == ["Oslo", "Rome"]
    assert messages[-1].content == SUNNY
    session.groups(2)


def test_the_responses_api_works_too(session: Session) -> None:
    chat = model(session, use_responses_api=True)
    assert chat.invoke(say(SUNNY)).text == SUNNY
    bound = chat.bind_tools([WEATHER])
    answer = sum_of(bound.stream(call(OSLO)))
    assert [(tool_call["name"], tool_call["args"]) for tool_call in answer.tool_calls] == [OSLO]
    groups = session.groups(2)
    assert {group["route"] for group in groups} == {"/v1/responses"}


def test_an_unknown_model_is_refused_without_retries(session: Session) -> None:
    openai = library("openai")
    other = model(session).model_copy(update={"model_name": "other"})
    with pytest.raises(openai.NotFoundError):
        other.invoke("hi")
    session.refused(404)
