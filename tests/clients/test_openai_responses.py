"""Tests of the Responses API with OpenAI's Python client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.clients.prompts import ADA, MODEL, SUNNY, Person, num_tokens, say
from tests.clients.sessions import SESSION, Session
from tests.clients.tools import CITY, OSLO, RESULT, ROME, call

pytestmark = SESSION

WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
HELLO = "Hello, wörld."


def test_an_answer_is_complete_and_has_usage(client: openai.OpenAI, session: Session) -> None:
    answer = client.responses.create(model=MODEL, input=say(HELLO), instructions="Be nice.")
    assert (answer.output_text, answer.status, answer.error) == (HELLO, "completed", None)
    assert (answer.object, answer.model) == ("response", MODEL)
    assert answer.usage is not None
    assert answer.usage.output_tokens == num_tokens(HELLO), "of the served sibling only"
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    (group,) = session.groups(1)
    assert group["route"] == "/v1/responses"


def test_a_streams_events_are_in_order(client: openai.OpenAI, session: Session) -> None:
    events = list(client.responses.create(model=MODEL, input=say(HELLO), stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == HELLO
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == HELLO
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == num_tokens(HELLO)
    session.groups(1)


def test_the_stream_helper_returns_the_text(client: openai.OpenAI, session: Session) -> None:
    with client.responses.stream(model=MODEL, input=say(HELLO)) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_text.delta", "response.output_text.done"} <= kinds
    assert final.output_text == HELLO
    session.groups(1)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop_ends_with_an_answer(
    client: openai.OpenAI, session: Session, streamed: bool
) -> None:
    items: list[Any] = [{"role": "user", "content": call(OSLO, ROME)}]
    first = complete(client, streamed, input=items)
    calls = calls_of(first)
    assert [(tool_call.name, json.loads(tool_call.arguments)) for tool_call in calls] == [
        OSLO,
        ROME,
    ]
    assert len({tool_call.call_id for tool_call in calls}) == 2
    assert len({tool_call.id for tool_call in calls}) == 2
    items += [item.model_dump(exclude_none=True) for item in first.output]
    second = complete(client, streamed, input=items + results_of(first))
    assert (second.output_text, second.status) == (SUNNY, "completed")
    session.groups(2)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop_can_use_the_previous_response_id(
    client: openai.OpenAI, session: Session, streamed: bool
) -> None:
    first = complete(client, streamed, input=call(OSLO))
    second = complete(client, streamed, input=results_of(first), previous_response_id=first.id)
    assert second.output_text == SUNNY
    assert second.previous_response_id == first.id
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens, (
        "the model got the previous messages"
    )
    session.groups(2)


def test_a_conversation_can_continue_from_the_previous_response_id(
    client: openai.OpenAI, session: Session
) -> None:
    first = client.responses.create(model=MODEL, input=say(HELLO))
    second = client.responses.create(model=MODEL, input=say(SUNNY), previous_response_id=first.id)
    assert second.output_text == SUNNY
    assert len({first.id, second.id}) == 2
    session.groups(2)


def test_an_unknown_previous_response_id_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="resp_nowhere"):
        client.responses.create(model=MODEL, input="hi", previous_response_id="resp_nowhere")


def complete(client: openai.OpenAI, streamed: bool, **fields: Any) -> Response:
    responses: Any = client.responses
    if not streamed:
        return responses.create(model=MODEL, tools=[WEATHER], **fields)
    with responses.stream(model=MODEL, tools=[WEATHER], **fields) as stream:
        return stream.get_final_response()


def calls_of(response: Response) -> list[Any]:
    return [item for item in response.output if item.type == "function_call"]


def results_of(response: Response) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": tool_call.call_id, "output": RESULT}
        for tool_call in calls_of(response)
    ]


def test_function_calls_have_their_own_events(client: openai.OpenAI, session: Session) -> None:
    events: list[Any] = list(
        client.responses.create(model=MODEL, input=call(OSLO), tools=[WEATHER], stream=True)
    )
    arguments = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert json.loads("".join(arguments)) == json.loads(done.arguments) == OSLO[1]
    opened = [event.item for event in events if event.type == "response.output_item.added"]
    closed = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in opened] == [item.type for item in closed] == ["function_call"]
    assert opened[0].id == closed[0].id == done.item_id
    session.groups(1)


def test_an_answer_is_parsed_by_its_schema(client: openai.OpenAI, session: Session) -> None:
    answer = client.responses.parse(model=MODEL, input=say(ADA), text_format=Person)
    assert answer.output_parsed == Person(name="Ada", age=36)
    session.groups(1)


def test_an_answer_that_reaches_its_limit_is_incomplete(
    client: openai.OpenAI, session: Session
) -> None:
    answer = client.responses.create(model=MODEL, input=say(HELLO), max_output_tokens=5)
    assert (answer.output_text, answer.status) == ("Hello", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    session.groups(1)


def test_an_unknown_model_is_refused_with_and_without_streaming(
    client: openai.OpenAI, session: Session
) -> None:
    for streamed in (False, True):
        with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
            client.responses.create(model="other", input="hi", stream=streamed)
    session.refused(404, 404)


def test_an_invalid_request_is_refused_without_retries(
    client: openai.OpenAI, session: Session
) -> None:
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="hi", temperature=-1)
    session.refused(400)
