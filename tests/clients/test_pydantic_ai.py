"""Tests of pydantic-ai, which validates answers most strictly, with three of the four formats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.prompts import ADA, KEY, MODEL, SUNNY, Person, num_tokens, say
from tests.clients.sessions import SESSION, Session, library
from tests.clients.tools import OSLO, RESULT, ROME, call

pytestmark = SESSION

ROUTES = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(session: Session, route: str) -> Any:
    maker = "anthropic" if route == "messages" else "openai"
    models = library(f"pydantic_ai.models.{maker}")
    providers = library(f"pydantic_ai.providers.{maker}")
    if route == "messages":
        provider = providers.AnthropicProvider(base_url=session.url, api_key=KEY)
        return models.AnthropicModel(MODEL, provider=provider)
    provider = providers.OpenAIProvider(base_url=session.base_url, api_key=KEY)
    kind = models.OpenAIChatModel if route == "chat" else models.OpenAIResponsesModel
    return kind(MODEL, provider=provider)


def agent_of(model: Any, **fields: Any) -> Any:
    return library("pydantic_ai").Agent(model, instructions="Help.", retries=0, **fields)


def check(session: Session, route: str, count: int) -> None:
    assert [group["route"] for group in session.groups(count)] == [ROUTES[route]] * count


async def test_a_plain_answer_has_its_text_and_its_usage(
    model: Any, session: Session, route: str
) -> None:
    result = await agent_of(model).run(say(SUNNY))
    assert result.output == SUNNY
    assert result.usage.output_tokens == num_tokens(SUNNY)
    assert result.response.finish_reason == "stop"
    check(session, route, 1)


async def test_a_streams_chunks_add_up_to_the_answer(
    model: Any, session: Session, route: str
) -> None:
    async with agent_of(model).run_stream(say(SUNNY)) as result:
        parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(parts) == SUNNY
    assert result.usage.output_tokens == num_tokens(SUNNY)
    check(session, route, 1)


@pytest.mark.parametrize("streamed", [False, True])
async def test_tools_are_called_and_the_run_ends(
    model: Any, session: Session, route: str, streamed: bool
) -> None:
    cities: list[str] = []

    def get_weather(city: str) -> str:
        """Weather of a city"""
        cities.append(city)
        return RESULT

    agent = agent_of(model, tools=[get_weather])
    if streamed:
        async with agent.run_stream(call(OSLO, ROME)) as result:
            output = await result.get_output()
    else:
        output = (await agent.run(call(OSLO, ROME))).output
    assert output == SUNNY
    assert sorted(cities) == ["Oslo", "Rome"]
    check(session, route, 2)


async def test_a_structured_output_uses_a_forced_tool_call(
    model: Any, session: Session, route: str
) -> None:
    result = await agent_of(model, output_type=Person).run(call(("final_result", json.loads(ADA))))
    assert result.output == Person(name="Ada", age=36)
    check(session, route, 1)


async def test_a_structured_output_can_be_the_answer_itself(
    model: Any, session: Session, route: str
) -> None:
    if route == "messages":
        pytest.skip("of the models it knows by name only")
    native = library("pydantic_ai").NativeOutput(Person)
    result = await agent_of(model, output_type=native).run(say(ADA))
    assert result.output == Person(name="Ada", age=36)
    check(session, route, 1)
