"""Tests of OpenAI's Agents SDK with the Responses API, its default, and with chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.clients.prompts import ADA, KEY, MODEL, SUNNY, Person, num_tokens, say
from tests.clients.sessions import SESSION, Session, library
from tests.clients.tools import OSLO, RESULT, ROME, call

pytestmark = SESSION

APIS = {"responses": "/v1/responses", "chat_completions": "/v1/chat/completions"}


class Agents:
    """The library, configured for one API of one proxy."""

    def __init__(self, session: Session, api: str, client: Any) -> None:
        self.lib = library("agents")
        self.session = session
        self.route = APIS[api]
        kind = {
            "responses": self.lib.OpenAIResponsesModel,
            "chat_completions": self.lib.OpenAIChatCompletionsModel,
        }[api]
        self._model = kind(model=MODEL, openai_client=client)
        self.cities: list[str] = []

    def agent(self, name: str = "Helper", **fields: Any) -> Any:
        return self.lib.Agent(name=name, instructions="Help.", model=self._model, **fields)

    @property
    def weather(self) -> Any:
        def get_weather(city: str) -> str:
            """Weather of a city"""
            self.cities.append(city)
            return RESULT

        return self.lib.function_tool(get_weather)

    def check(self, count: int) -> None:
        assert [group["route"] for group in self.session.groups(count)] == [self.route] * count


@pytest.fixture(params=APIS)
async def agents(request: pytest.FixtureRequest, session: Session) -> AsyncIterator[Agents]:
    library("agents").set_tracing_disabled(True)  # traces would be sent to OpenAI
    async with library("openai").AsyncOpenAI(base_url=session.base_url, api_key=KEY) as client:
        yield Agents(session, request.param, client)


async def test_a_plain_answer_has_its_text_and_its_usage(agents: Agents) -> None:
    result = await agents.lib.Runner.run(agents.agent(), say(SUNNY))
    assert result.final_output == SUNNY
    assert result.context_wrapper.usage.output_tokens == num_tokens(SUNNY)
    agents.check(1)


async def test_tools_are_called_and_the_run_ends(agents: Agents) -> None:
    agent = agents.agent(tools=[agents.weather])
    result = await agents.lib.Runner.run(agent, call(OSLO, ROME), max_turns=4)
    assert result.final_output == SUNNY
    assert sorted(agents.cities) == ["Oslo", "Rome"]
    agents.check(2)


async def test_a_streamed_run_calls_its_tools_and_ends(agents: Agents) -> None:
    agent = agents.agent(tools=[agents.weather])
    result = agents.lib.Runner.run_streamed(agent, call(OSLO, ROME), max_turns=4)
    names = [
        event.name
        async for event in result.stream_events()
        if event.type == "run_item_stream_event"
    ]
    assert result.final_output == SUNNY
    assert sorted(agents.cities) == ["Oslo", "Rome"]
    assert names.count("tool_called") == names.count("tool_output") == 2
    assert names.count("message_output_created") == 1
    agents.check(2)


async def test_an_output_type_is_filled_in(agents: Agents) -> None:
    agent = agents.agent(output_type=Person)
    result = await agents.lib.Runner.run(agent, say(ADA))
    assert result.final_output == Person(name="Ada", age=36)
    agents.check(1)


async def test_a_handoff_is_followed(agents: Agents) -> None:
    expert = agents.agent("Expert")
    front = agents.agent("Front", handoffs=[expert])
    result = await agents.lib.Runner.run(front, call(("transfer_to_expert", {})), max_turns=2)
    assert result.last_agent is expert
    assert result.final_output == SUNNY
    agents.check(2)
