from __future__ import annotations

import asyncio
import math
from typing import Any

import orjson
import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.vllm_compat.chat_request import parse_chat_request
from fakevllm_server.backends.fake.byte_tokens import EOS
from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.backends.fake.minimal_json_value import minimal_value
from fakevllm_server.backends.http.chat_completion import ChatCompletion
from fakevllm_server.types.backend import Batch, Call, LossSpec
from fakevllm_server.types.sampling import Sampling

Json = dict[str, Any]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 2}},
            "required": ["a"],
        },
    },
}
LOOK = {"type": "function", "function": {"name": "look"}}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def sample(messages: list[Json], **fields: Any) -> Json:
    raw = orjson.dumps({"messages": messages} | fields)
    completion = ChatCompletion(FakeEngine(), parse_chat_request(raw), None)
    return (await completion.answer())["choices"][0]


async def content(text: str, **fields: Any) -> str:
    return (await sample([user(text)], **fields))["message"]["content"]


def tool_calls(choice: Json) -> list[tuple[str, Any]]:
    """Return name and arguments of each tool call of a choice."""
    functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
    return [(each["name"], orjson.loads(each["arguments"])) for each in functions]


def with_results(choice: Json) -> list[Json]:
    """Return the assistant's message and one result for each of its calls."""
    calls = choice["message"]["tool_calls"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in calls]
    return [choice["message"], *results]


async def test_an_answer_that_begins_with_the_end_token_can_be_trained() -> None:
    engine = FakeEngine()
    job = TrainJob(lr=0.1)
    await engine.boot(job)
    calls = [Call("g", [1], [EOS], [-0.5], 0, temperature=0.01, advantage=1.0, weight=1.0)]
    metrics = await engine.step(Batch(1, calls), LossSpec.of(job))
    assert math.isfinite(metrics["theta"])


async def test_scripted_calls_are_made_one_per_turn_before_the_text() -> None:
    messages = [user('[[call add {"a": [[1]]}]] then [[call look]] [[say all done]]')]
    calls: list[Any] = []
    for _ in range(2):
        reply = await sample(messages, tools=[ADD, LOOK])
        assert reply["finish_reason"] == "tool_calls"
        calls += tool_calls(reply)
        messages += with_results(reply)
    last = await sample(messages, tools=[ADD, LOOK])

    assert calls == [("add", {"a": [[1]]}), ("look", {})]
    assert (last["message"]["content"], last["finish_reason"]) == ("all done", "stop")


async def test_scripted_calls_joined_by_an_ampersand_are_made_in_one_turn() -> None:
    messages = [user('[[call add {"a": 1} & look {}]]')]
    reply = await sample(messages, tools=[ADD, LOOK])
    assert tool_calls(reply) == [("add", {"a": 1}), ("look", {})]

    first = await sample(messages, tools=[ADD, LOOK], parallel_tool_calls=False)
    assert tool_calls(first) == [("add", {"a": 1})]

    after = await sample([*messages, *with_results(reply)], tools=[ADD, LOOK])
    assert after["message"]["content"] == "done"


async def test_a_script_survives_a_later_message_and_ends_with_its_answer() -> None:
    script, reminder = user("[[say blue]]"), user("be brief")
    assert (await sample([script, reminder]))["message"]["content"] == "blue"
    over = [script, {"role": "assistant", "content": "blue"}, reminder]
    assert (await sample(over))["message"]["content"] in ("yes.", "no.")


async def test_a_forced_tool_is_called_with_scripted_or_minimal_arguments() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    reply = await sample([user("hi")], tools=[LOOK, ADD], tool_choice=named)
    assert tool_calls(reply) == [("add", {"a": 2})]
    assert (reply["finish_reason"], reply["message"]["content"]) == ("stop", "")

    reply = await sample([user("hi")], tools=[ADD, LOOK], tool_choice="required")
    assert tool_calls(reply) == [("add", {"a": 2})]
    assert (reply["finish_reason"], reply["message"]["content"]) == ("tool_calls", "")

    scripted = [user('[[call add {"a": 7}]]')]
    reply = await sample(scripted, tools=[ADD, LOOK], tool_choice="required")
    assert tool_calls(reply) == [("add", {"a": 7})]


async def test_the_answer_fits_a_schema_or_a_choice() -> None:
    schema = {"name": "s", "schema": ADD["function"]["parameters"]}
    format = {"type": "json_schema", "json_schema": schema}
    assert await content("hi", response_format=format) == '{"a": 2}'
    assert await content('[[say {"a": 9}]]', response_format=format) == '{"a": 9}'
    assert await content("hi", response_format={"type": "json_object"}) == "{}"
    choices = {"choice": ["red", "blue"]}
    assert await content("hi", structured_outputs=choices) == "red"
    assert await content("[[say blue]]", structured_outputs=choices) == "blue"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
)
async def test_an_unsupported_parameter_is_refused_by_name(fields: Json, name: str) -> None:
    with pytest.raises(WireError, match=f"`.*{name}` is not supported"):
        await content("hi", **fields)


async def test_a_logit_bias_changes_the_answer_and_its_logprob() -> None:
    biased = {"logit_bias": {str(ord("y")): 500}, "logprobs": True}
    reply = await sample([user("hi")], **biased)
    assert reply["message"]["content"] == "yes."
    assert reply["logprobs"]["content"][0]["logprob"] == pytest.approx(0.0)


async def test_a_stop_id_ends_the_answer_and_is_reported() -> None:
    reply = await sample([user("[[say abc]]")], stop_token_ids=[ord("b")])
    assert (reply["message"]["content"], reply["stop_reason"]) == ("a", ord("b"))
    shown = {"stop_token_ids": [ord("b")], "include_stop_str_in_output": True}
    assert await content("[[say abc]]", **shown) == "ab"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"enum": ["x", "y"]}, "x"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"const": 4}}}, 4),
        ({"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]}, "xx"),
        ({"type": "array", "minItems": 2, "items": {"type": "boolean"}}, [False, False]),
        ({"type": ["integer", "null"], "exclusiveMinimum": 3, "multipleOf": 5}, 10),
        ({"type": "number", "maximum": -1.5}, -1.5),
        ({"allOf": [{"type": "object"}, {"required": ["k"]}]}, {"k": None}),
    ],
)
def test_the_minimal_value_of_a_schema(schema: Json, value: Any) -> None:
    assert minimal_value(schema) == value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "foo"},
        {"$ref": "#"},
        {"type": "integer", "minimum": 3, "maximum": 2},
        False,
        {"type": "string", "pattern": "^a$"},
    ],
)
def test_a_schema_that_is_unsupported_or_allows_no_value_is_an_error(schema: Any) -> None:
    with pytest.raises(ValueError):
        minimal_value(schema)


async def test_the_engine_samples_a_bounded_number_of_answers_at_once_if_asked_to() -> None:
    engine = FakeEngine(token_delay_s=1e-4, max_num_seqs=2)
    most = 0

    async def answer() -> int:
        nonlocal most
        num_tokens = 0
        async for tokens in engine.generate([1], Sampling(max_tokens=8)):
            most = max(most, 6 - engine.num_waiting - num_ended[0])
            num_tokens += len(tokens)
        num_ended[0] += 1
        return num_tokens

    num_ended = [0]
    counts = await asyncio.gather(*(answer() for _ in range(6)))
    assert min(counts) > 1 and most == 2
    assert engine.num_waiting == 0
