"""Python libraries in the fault tests: those of OpenAI and Anthropic, and libraries built on them.

The libraries raise their errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai

from tests.clients.fault_client import Client, Outcome, SendQuestion
from tests.clients.prompts import KEY, MODEL, user
from tests.clients.sessions import library
from tests.clients.tools import RESULT

LIMIT_S = 4.0

# --- clients of OpenAI and Anthropic


def _openai(read: Callable[[openai.OpenAI, str], Outcome]) -> SendQuestion:
    def send(url: str, question: str, folder: Path) -> Outcome:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=LIMIT_S) as client:
            return read(client, question)

    return send


def _chat(client: openai.OpenAI, question: str) -> Outcome:
    (choice,) = client.chat.completions.create(model=MODEL, messages=user(question)).choices
    return Outcome(choice.message.content or "", choice.finish_reason)


def _chat_stream(client: openai.OpenAI, question: str) -> Outcome:
    stream = client.chat.completions.create(model=MODEL, messages=user(question), stream=True)
    choices = [choice for chunk in stream for choice in chunk.choices]
    ends = [choice.finish_reason for choice in choices if choice.finish_reason]
    text = "".join(choice.delta.content or "" for choice in choices)
    return Outcome(text, ends[-1] if ends else None)


def _completions(client: openai.OpenAI, question: str) -> Outcome:
    (choice,) = client.completions.create(model=MODEL, prompt=question, max_tokens=99).choices
    return Outcome(choice.text, choice.finish_reason)


def _completions_stream(client: openai.OpenAI, question: str) -> Outcome:
    stream = client.completions.create(model=MODEL, prompt=question, max_tokens=99, stream=True)
    choices = [choice for chunk in stream for choice in chunk.choices]
    ends: list[Any] = [choice.finish_reason for choice in choices if choice.finish_reason]
    return Outcome("".join(choice.text for choice in choices), ends[-1] if ends else None)


def _responses(client: openai.OpenAI, question: str) -> Outcome:
    return _response(client.responses.create(model=MODEL, input=question))


def _responses_stream(client: openai.OpenAI, question: str) -> Outcome:
    events = list(client.responses.create(model=MODEL, input=question, stream=True))
    last: Any = events[-1]
    if last.type == "error":
        return Outcome(error=last.message)
    assert last.type in ("response.completed", "response.incomplete", "response.failed"), last
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    outcome = _response(last.response)
    assert outcome.error or outcome.text == "".join(texts)
    return outcome


def _response(answer: Any) -> Outcome:
    if answer.status == "failed":
        return Outcome(error=str(answer.error))
    return Outcome(answer.output_text, answer.status)


def _anthropic(streamed: bool) -> SendQuestion:
    def send(url: str, question: str, folder: Path) -> Outcome:
        body: Any = {"model": MODEL, "max_tokens": 99, "messages": user(question)}
        with library("anthropic").Anthropic(base_url=url, api_key=KEY, timeout=LIMIT_S) as client:
            if not streamed:
                answer = client.messages.create(**body)
            else:
                with client.messages.stream(**body) as stream:
                    answer = stream.get_final_message()
        return Outcome("".join(block.text for block in answer.content), answer.stop_reason)

    return send


def _official(send: SendQuestion, streamed: bool) -> Client:
    return Client(send, streamed, LIMIT_S, is_official=True)


# --- libraries built on these clients


def _langchain(streamed: bool) -> SendQuestion:
    def send(url: str, question: str, folder: Path) -> Outcome:
        lib = library("langchain_openai")
        model = lib.ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, timeout=LIMIT_S)
        chunks: list[Any] = list(model.stream(question)) if streamed else [model.invoke(question)]
        ends = [chunk.response_metadata.get("finish_reason") for chunk in chunks]
        end = next((end for end in ends if end), None)
        return Outcome("".join(chunk.content for chunk in chunks), end)

    return send


def _agents(api: str, streamed: bool, *, tools: bool = False) -> SendQuestion:
    async def run(client: Any, question: str) -> Outcome:
        lib = library("agents")
        lib.set_tracing_disabled(True)  # traces would be sent to OpenAI
        kind = {"responses": "OpenAIResponsesModel", "chat": "OpenAIChatCompletionsModel"}[api]
        model = getattr(lib, kind)(model=MODEL, openai_client=client)
        agent = lib.Agent(name="Helper", instructions="Help.", model=model)
        if tools:
            agent.tools.append(lib.function_tool(get_weather))
        if not streamed:
            return Outcome((await lib.Runner.run(agent, question)).final_output, "stop")
        result = lib.Runner.run_streamed(agent, question)
        async for _ in result.stream_events():
            pass
        return Outcome(result.final_output, "stop")

    return _async(run)


def _pydantic_ai(api: str, streamed: bool, *, tools: bool = False) -> SendQuestion:
    async def run(client: Any, question: str) -> Outcome:
        lib = library("pydantic_ai.models.openai")
        providers = library("pydantic_ai.providers.openai")
        provider = providers.OpenAIProvider(openai_client=client)
        kind = {"responses": "OpenAIResponsesModel", "chat": "OpenAIChatModel"}[api]
        model = getattr(lib, kind)(MODEL, provider=provider)
        used = [get_weather] if tools else []
        agent = library("pydantic_ai").Agent(model, instructions="Help.", tools=used, retries=0)
        if not streamed:
            result = await agent.run(question)
            return Outcome(result.output, result.response.finish_reason)
        async with agent.run_stream(question) as result:
            text = await result.get_output()
            return Outcome(text, result.response.finish_reason)

    return _async(run)


def get_weather(city: str) -> str:
    """Weather of a city"""
    return RESULT


def _async(run: Callable[[Any, str], Awaitable[Outcome]]) -> SendQuestion:
    async def send(url: str, question: str) -> Outcome:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=LIMIT_S) as client:
            return await run(client, question)

    return lambda url, question, folder: asyncio.run(send(url, question))


LIBRARIES: dict[str, Client] = {
    "openai, chat": _official(_openai(_chat), streamed=False),
    "openai, chat streamed": _official(_openai(_chat_stream), streamed=True),
    "openai, completions": _official(_openai(_completions), streamed=False),
    "openai, completions streamed": _official(_openai(_completions_stream), streamed=True),
    "openai, responses": _official(_openai(_responses), streamed=False),
    "openai, responses streamed": _official(_openai(_responses_stream), streamed=True),
    "anthropic": _official(_anthropic(False), streamed=False),
    "anthropic, streamed": _official(_anthropic(True), streamed=True),
    "LangChain": Client(_langchain(False), False, LIMIT_S),
    "LangChain, streamed": Client(_langchain(True), True, LIMIT_S),
    "agents, responses": Client(_agents("responses", False), False, LIMIT_S),
    "agents, responses streamed": Client(_agents("responses", True), True, LIMIT_S),
    "agents, chat": Client(_agents("chat", False), False, LIMIT_S),
    "agents, chat streamed": Client(_agents("chat", True), True, LIMIT_S),
    "pydantic-ai, chat": Client(_pydantic_ai("chat", False), False, LIMIT_S),
    "pydantic-ai, chat streamed": Client(_pydantic_ai("chat", True), True, LIMIT_S),
    "pydantic-ai, responses": Client(_pydantic_ai("responses", False), False, LIMIT_S),
    "pydantic-ai, responses streamed": Client(_pydantic_ai("responses", True), True, LIMIT_S),
}

WITH_TOOLS: dict[str, Client] = {
    f"{name}, {api}{' streamed' if streamed else ''} with a tool": Client(
        create(api, streamed, tools=True), streamed, LIMIT_S
    )
    for name, create in (("agents", _agents), ("pydantic-ai", _pydantic_ai))
    for api in ("chat", "responses")
    for streamed in (False, True)
}
