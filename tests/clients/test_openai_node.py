"""Tests of OpenAI's Node client: chat completions, completions and responses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.programs import Node
from tests.clients.prompts import ADA, MODEL, PERSON, SUNNY, num_tokens, say, user
from tests.clients.sessions import SESSION, Session
from tests.clients.tools import CITY, OSLO, RESULT, ROME, WEATHER, call

pytestmark = SESSION


@pytest.fixture
def node(session: Session, tmp_path: Path) -> Node:
    return Node(session.base_url, tmp_path / "project")


def test_the_model_is_listed(node: Node) -> None:
    assert [card["id"] for card in node.answer("models")] == [MODEL]


def test_an_answer_has_its_text_plain_streamed_and_with_the_stream_helper(
    node: Node, session: Session
) -> None:
    whole = node.answer("chat", messages=user(say(SUNNY)))
    assert whole["choices"][0]["message"]["content"] == SUNNY
    assert whole["usage"]["completion_tokens"] == num_tokens(SUNNY)
    chunks = node.answer(
        "chat_stream", messages=user(say(SUNNY)), stream_options={"include_usage": True}
    )
    *parts, last = chunks
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert "".join(delta.get("content") or "" for delta in deltas) == SUNNY
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], num_tokens(SUNNY))
    gathered = node.answer("chat_helper", messages=user(say(SUNNY)))
    assert gathered["choices"][0]["message"]["content"] == SUNNY
    assert gathered["choices"][0]["finish_reason"] == "stop"
    session.groups(3)


@pytest.mark.parametrize("name", ["chat", "chat_helper"])
def test_tools_are_called_in_parallel(node: Node, session: Session, name: str) -> None:
    answer = node.answer(name, messages=user(call(OSLO, ROME)), tools=[WEATHER])
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    assert len({tool_call["id"] for tool_call in calls}) == 2
    assert [
        (tool_call["function"]["name"], json.loads(tool_call["function"]["arguments"]))
        for tool_call in calls
    ] == [OSLO, ROME]
    session.groups(1)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_tool_runner_calls_the_tools_and_ends(
    node: Node, session: Session, streamed: bool
) -> None:
    result = node.answer(
        "run_tools", messages=user(call(OSLO, ROME)), result=RESULT, stream=streamed
    )
    assert sorted(result["cities"]) == ["Oslo", "Rome"]
    assert result["content"] == SUNNY
    session.groups(2)


def test_an_answer_is_parsed_by_its_schema(node: Node, session: Session) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "Person", "schema": PERSON}}
    answer = node.answer("chat", messages=user(say(ADA)), response_format=schema)
    assert json.loads(answer["choices"][0]["message"]["content"]) == json.loads(ADA)
    session.groups(1)


def test_completions_are_answered(node: Node, session: Session) -> None:
    answer = node.answer("completions", prompt=say(SUNNY), max_tokens=64)
    assert [choice["text"] for choice in answer["choices"]] == [SUNNY]
    session.groups(1)


def test_a_response_has_its_text_plain_streamed_and_with_the_stream_helper(
    node: Node, session: Session
) -> None:
    whole = node.answer("responses", input=say(SUNNY))
    assert (whole["output_text"], whole["status"]) == (SUNNY, "completed")
    events = node.answer("responses_stream", input=say(SUNNY))
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(texts) == SUNNY
    gathered = node.answer("responses_helper", input=say(SUNNY))
    assert gathered["output_text"] == SUNNY
    session.groups(3)


def test_a_response_calls_tools(node: Node, session: Session) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
    answer = node.answer("responses_helper", input=call(OSLO, ROME), tools=[tool])
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    assert [(tool_call["name"], json.loads(tool_call["arguments"])) for tool_call in calls] == [
        OSLO,
        ROME,
    ]
    assert len({tool_call["call_id"] for tool_call in calls}) == 2
    session.groups(1)


@pytest.mark.parametrize("name", ["chat", "chat_stream"])
def test_refusals_raise_the_clients_own_errors_without_retries(
    node: Node, session: Session, name: str
) -> None:
    result = node(name, messages=user("hi"), temperature=-1)
    assert (result["error"], result["status"]) == ("BadRequestError", 400)
    assert result["body"]["message"].startswith("temperature must be non-negative")
    result = node(name, messages=user("hi"), model="other")
    assert (result["error"], result["status"]) == ("NotFoundError", 404)
    session.refused(400, 404)
