"""Answers under a grammar, from the engine to the HTTP response."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from typing import Any

import orjson
import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import ask, collect, load, plain_logprobs
from transformers import AutoTokenizer

from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.vllm_compat.chat_request import parse_chat_request
from fakevllm_adapters.vllm_compat.grammar import Grammar
from fakevllm_server.backends.embedded.decode.grammar import MAX_WHITESPACE, GrammarCompiler
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.embedded.engine import EmbeddedEngine
from fakevllm_server.backends.http.chat_completion import ChatCompletion
from fakevllm_server.types.sampling import Sampling

Json = dict[str, Any]
PARAMETERS: Json = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Bonn"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOL: Json = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NAMED: Json = {"type": "function", "function": {"name": "weather"}}
SCHEMA: Json = {
    "type": "json_schema",
    "json_schema": {"name": "w", "schema": PARAMETERS, "strict": True},
}
REQUIRED: Json = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def completion(engine: EmbeddedEngine, **fields: Any) -> ChatCompletion:
    body: Json = {"messages": [{"role": "user", "content": "How is it?"}], "max_tokens": 200}
    return ChatCompletion(engine, parse_chat_request(orjson.dumps(body | fields)), None)


def grammars(engine: EmbeddedEngine) -> GrammarCompiler:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    return GrammarCompiler(tokenizer, len(tokenizer), engine.eos_ids)


async def choice(engine: EmbeddedEngine, **fields: Any) -> Json:
    return (await completion(engine, **fields).answer())["choices"][0]


async def streamed(engine: EmbeddedEngine, **fields: Any) -> list[Json]:
    return [chunk async for chunk in completion(engine, stream=True, **fields).chunks()]


def keeps(value: Any) -> bool:
    return (
        list(value) == ["city", "days"]
        and value["city"] in ("Paris", "Bonn")
        and value["days"] in range(1, 10)
    )


@pytest.mark.parametrize("temperature", [0, 1, 2])
async def test_an_answer_follows_its_json_schema_at_any_temperature(
    demo_engine: EmbeddedEngine, temperature: float
) -> None:
    for seed in range(3):
        answer = await choice(
            demo_engine, response_format=SCHEMA, seed=seed, temperature=temperature
        )
        assert answer["finish_reason"] == "stop"
        assert keeps(json.loads(answer["message"]["content"]))


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]"}, "[a-c]{3}-[0-9]"),
        ({"choice": ['say "hi"', "größer\n"]}, '(say "hi"|größer\n)'),
        ({"grammar": 'root ::= "a" root | "b"'}, "a*b"),
        ({"json": {"type": "boolean"}}, "true|false"),
    ],
)
async def test_answers_follow_other_grammars(
    demo_engine: EmbeddedEngine, constraint: Json, pattern: str
) -> None:
    answer = await choice(demo_engine, structured_outputs=constraint, temperature=1.5, seed=3)
    text = answer["message"]["content"]
    assert re.fullmatch(pattern, text) or answer["finish_reason"] == "length"
    assert answer["finish_reason"] == "stop" or set(text) == {"a"}


async def test_a_json_object_begins_with_a_brace(demo_engine: EmbeddedEngine) -> None:
    answer = await choice(demo_engine, response_format={"type": "json_object"}, seed=1)
    assert answer["message"]["content"].startswith("{")


@pytest.mark.parametrize("format", [SCHEMA, {"type": "json_object"}], ids=["schema", "any object"])
async def test_white_space_in_json_is_bounded(demo_engine: EmbeddedEngine, format: Json) -> None:
    (newline,) = demo_engine.encode("\n", False)
    likes = {"logit_bias": {str(newline): 100}, "max_tokens": 40, "temperature": 0}
    answer = await choice(demo_engine, response_format=format, **likes)
    text = answer["message"]["content"]
    runs = [len(run) for run in re.findall(r"\s+", text)]
    assert runs[0] == MAX_WHITESPACE == max(runs)
    assert len(text) > len("{") + MAX_WHITESPACE, "it goes on after the first run"


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("schema", [{"type": "object"}, {}], ids=["any object", "any value"])
async def test_compact_and_indented_json_is_allowed(
    demo_engine: EmbeddedEngine, schema: Json, indent: int | None
) -> None:
    nested: Json = {"a": [{"b": {"c": [1, -2.5e3]}, "d": None}, "e\n", True], "f": {}, "g": []}
    matcher = await grammars(demo_engine).matcher(Grammar("json", json.dumps(schema)))
    for id in demo_engine.encode(json.dumps(nested, indent=indent), False):
        allowed = matcher.allowed()
        assert allowed is None or allowed[id]
        matcher.take(id)
    end = matcher.allowed()
    assert end is None or all(end[id] for id in demo_engine.eos_ids)


async def test_a_required_tool_call_has_the_shape_of_vllm(demo_engine: EmbeddedEngine) -> None:
    answer = await choice(demo_engine, **REQUIRED, seed=1)

    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and call["id"].startswith("chatcmpl-tool-")
    assert keeps(json.loads(call["function"]["arguments"]))
    assert (answer["message"]["content"], answer["finish_reason"]) == ("", "tool_calls")


async def test_a_named_tool_is_called_with_finish_reason_stop(demo_engine: EmbeddedEngine) -> None:
    answer = await choice(demo_engine, tools=[TOOL], tool_choice=NAMED, seed=1)

    (call,) = answer["message"]["tool_calls"]
    assert keeps(json.loads(call["function"]["arguments"]))
    assert (answer["message"]["content"], answer["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("fields", [REQUIRED, {"tools": [TOOL], "tool_choice": NAMED}])
async def test_a_forced_call_streams_its_name_and_then_its_arguments(
    demo_engine: EmbeddedEngine, fields: Json
) -> None:
    whole = await choice(demo_engine, **fields, seed=1)
    chunks = await streamed(demo_engine, **fields, seed=1)

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    opening, *rest = [delta["tool_calls"][0] for delta in deltas[1:-1]]
    assert list(opening) == ["id", "type", "index", "function"]
    assert opening["function"] == {"name": "weather"} and len(rest) > 1
    arguments = "".join(part["function"]["arguments"] for part in rest)
    answer = whole["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == json.loads(answer)
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


async def test_a_streamed_answer_under_a_grammar_equals_the_whole_answer(
    demo_engine: EmbeddedEngine,
) -> None:
    fields: Json = {"response_format": SCHEMA, "seed": 5, "return_token_ids": True}
    whole = await choice(demo_engine, **fields)
    chunks = await streamed(demo_engine, **fields)

    parts = [chunk["choices"][0] for chunk in chunks]
    text = "".join(part["delta"].get("content") or "" for part in parts)
    ids = [id for part in parts for id in part.get("token_ids") or []]
    assert (text, ids) == (whole["message"]["content"], whole["token_ids"])


async def test_logprobs_are_those_over_the_tokens_that_the_grammar_allows(
    demo_engine: EmbeddedEngine,
) -> None:
    prompt = demo_engine.render(ask("Yes?"))
    allowed = [demo_engine.encode(letter, False)[0] for letter in "abc"]
    sampling = Sampling(
        grammar=Grammar("regex", "[abc]"), top_logprobs=5, temperature=1.3, max_tokens=2
    )

    first, end = await collect(demo_engine.generate(prompt, sampling))

    raw = plain_logprobs(load(DEMO_MODEL_DIR), prompt, 1.3)[-1]
    left = torch.log_softmax(raw[allowed], -1)
    assert first.logprob == pytest.approx(left[allowed.index(first.id)].item(), abs=1e-4)
    assert [value for _, value in first.top[3:]] == [-9999.0] * 2
    assert end.id in demo_engine.eos_ids and end.logprob == 0


async def test_rows_without_a_grammar_are_sampled_as_if_alone(
    demo_engine: EmbeddedEngine,
) -> None:
    prompt = demo_engine.render(ask("Count."))

    async def tokens(sampling: Sampling) -> list[int]:
        return [token.id for token in await collect(demo_engine.generate(prompt, sampling))]

    free = [Sampling(max_tokens=30, seed=seed, ignore_eos=True) for seed in range(4)]
    held = [
        Sampling(max_tokens=30, seed=seed, grammar=Grammar("regex", "[0-9]{4}"))
        for seed in range(4)
    ]
    penalised = [Sampling(max_tokens=30, seed=1, frequency_penalty=2.0, ignore_eos=True)]
    every = [row for pair in zip(free, held, strict=True) for row in pair] + penalised

    alone = [await tokens(row) for row in every]
    together = await asyncio.gather(*map(tokens, every))

    assert together == alone
    for row, ids in zip(every, together, strict=True):
        if row.grammar is not None:
            assert re.fullmatch("[0-9]{4}", demo_engine.decode(ids))


REFUSED: list[tuple[Json, str]] = [
    (
        {"json": {"type": "foo"}},
        'Failed to transform json schema into a grammar: Unsupported type "foo"',
    ),
    ({"json": {"type": "array", "uniqueItems": True}}, "features not supported by xgrammar"),
    ({"regex": "("}, "Failed to transform regex into a grammar: Regex parsing error"),
    ({"grammar": "root ::= x"}, "Invalid grammar specification"),
    ({"grammar": "start: 'x'"}, "not Lark"),
    ({"structural_tag": "{}"}, "Invalid structural tag specification"),
    ({"regex": "a" * 300_000}, "at most 200000"),
]


@pytest.mark.parametrize(("constraint", "message"), REFUSED)
def test_an_invalid_grammar_is_refused_before_the_first_byte(
    demo_engine: EmbeddedEngine, constraint: Json, message: str
) -> None:
    with pytest.raises(WireError) as refusal:
        completion(demo_engine, structured_outputs=constraint, stream=True)
    assert refusal.value.status == 400 and message in refusal.value.message


def test_a_deeply_nested_schema_is_refused(demo_engine: EmbeddedEngine) -> None:
    schema: Json = {"type": "integer"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(WireError, match="nested deeper than"):
        completion(demo_engine, structured_outputs={"json": schema})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {"9999": 1}}, r"token_id\(s\) \[9999\] in logit_bias contain"),
        ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty!"),
        ({"allowed_token_ids": [-1]}, "contains out-of-vocab token id!"),
        ({"min_tokens": 201}, "less than or equal to max_tokens=200, got 201"),
    ],
)
def test_ids_outside_of_the_vocabulary_are_refused(
    demo_engine: EmbeddedEngine, fields: Json, message: str
) -> None:
    with pytest.raises(WireError, match=message):
        completion(demo_engine, **fields)


async def test_min_tokens_stop_ids_and_bad_words_are_obeyed(demo_engine: EmbeddedEngine) -> None:
    long = await choice(demo_engine, min_tokens=60, max_tokens=60, return_token_ids=True)
    assert len(long["token_ids"]) == 60 and not demo_engine.eos_ids & set(long["token_ids"])

    digits = demo_engine.encode("0123456789", False)
    only = await choice(demo_engine, allowed_token_ids=digits, max_tokens=20)
    assert re.fullmatch("[0-9]{20}", only["message"]["content"])

    stopped = await choice(
        demo_engine, allowed_token_ids=digits, stop_token_ids=digits[:5], max_tokens=150, seed=1
    )
    assert stopped["finish_reason"] == "stop" and stopped["stop_reason"] in digits[:5]
    assert re.fullmatch("[5-9]*", stopped["message"]["content"])

    banned = [f"{digit}" for digit in range(9)]
    left = await choice(demo_engine, allowed_token_ids=digits, bad_words=banned, max_tokens=9)
    assert left["message"]["content"] == "9" * 9


async def test_greedy_takes_the_likeliest_that_the_bias_leaves(
    demo_engine: EmbeddedEngine,
) -> None:
    letter = demo_engine.encode("Q", False)[0]
    answer = await choice(demo_engine, logit_bias={str(letter): 500}, temperature=0, max_tokens=3)
    assert answer["message"]["content"] == "QQQ"


def test_xgrammar_is_imported_only_for_a_request_with_a_grammar() -> None:
    check = (
        "import sys, fakevllm_server.backends.embedded.engine; assert 'xgrammar' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=55)
