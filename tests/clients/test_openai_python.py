"""Tests of OpenAI's Python client, with retries: chat completions and completions."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.clients.prompts import ADA, KEY, MODEL, Person, num_tokens, say, user
from tests.clients.sessions import SESSION, Session

pytestmark = SESSION

HELLO = "Hello, wörld."


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


def test_an_answer_that_reaches_its_limit_has_the_finish_reason_length(
    client: openai.OpenAI, session: Session
) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user(say(HELLO)), max_completion_tokens=5
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
        "Hello",
        "length",
    )
    session.groups(1)


def test_a_streams_chunks_are_one_answer_with_usage_last(
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


def test_the_stream_helper_returns_the_text(client: openai.OpenAI, session: Session) -> None:
    with client.chat.completions.stream(model=MODEL, messages=user(say(HELLO))) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == (HELLO, "stop")
    session.groups(1)


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


def test_several_choices_are_returned_from_one_sibling(
    client: openai.OpenAI, session: Session
) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user(say(HELLO)), n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.message.content for choice in answer.choices] == [HELLO] * 2
    session.groups(1, siblings=1)


def test_each_token_has_log_probabilities(client: openai.OpenAI, session: Session) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user(say(HELLO)), logprobs=True, top_logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == num_tokens(HELLO)
    assert [len(token.top_logprobs) for token in logprobs.content] == [1] * num_tokens(HELLO)
    session.groups(1)


def test_the_raw_answer_can_be_read_and_has_the_apps_request_id(
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
    answer: Any = client.completions.create(
        model=MODEL, prompt=say(HELLO), max_tokens=64, stream=streamed
    )
    parts = list(answer) if streamed else [answer]
    assert "".join(part.choices[0].text for part in parts) == HELLO
    assert parts[-1].choices[0].finish_reason == "stop"
    assert parts[0].object == "text_completion"
    assert parts[0].id.startswith("cmpl-")
    session.groups(1)


def test_an_invalid_request_raises_the_clients_own_error_without_retries(
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


def test_an_unknown_model_is_refused_with_and_without_streaming(
    client: openai.OpenAI, session: Session
) -> None:
    for streamed in (False, True):
        with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
            client.chat.completions.create(model="other", messages=user("hi"), stream=streamed)
    session.refused(404, 404)


def test_an_unknown_path_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="hi")
