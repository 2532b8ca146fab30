"""Requests of every shape that an openai client can make of the demo's model."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR

QUESTION = "What is 2 plus 3?"
ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
ADD: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two digits.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [1, 2, 3]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "sum",
        "schema": {
            "type": "object",
            "properties": {"sum": {"enum": [4, 5, 6]}},
            "required": ["sum"],
            "additionalProperties": False,
        },
    },
}


def ask_in_every_shape(app: openai.OpenAI) -> None:
    create = app.chat.completions.create
    auto = create(model="demo", messages=ASKED, tools=[ADD], max_tokens=24)
    assert auto.choices[0].finish_reason in ("stop", "length", "tool_calls")
    named: Any = {"type": "function", "function": {"name": "add"}}
    for wanted in (named, "required"):
        reply = create(
            model="demo",
            messages=ASKED,
            tools=[ADD],
            tool_choice=wanted,
            max_tokens=100,
            logit_bias=no_white_space(),
        )
        assert reply.choices[0].message.tool_calls, reply
        for call in reply.choices[0].message.tool_calls:
            assert call.type == "function" and call.function.name == "add"
            assert set(json.loads(call.function.arguments)) == {"a", "b"}
    formed = create(
        model="demo",
        messages=ASKED,
        response_format=SCHEMA,
        max_tokens=100,
        logit_bias=no_white_space(),
    )
    assert json.loads(formed.choices[0].message.content or "")["sum"] in (4, 5, 6)
    scored = create(model="demo", messages=ASKED, logprobs=True, top_logprobs=2, max_tokens=24)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and scored.usage is not None
    assert len(logprobs.content) == scored.usage.completion_tokens
    assert all(len(token.top_logprobs) >= 2 for token in logprobs.content)
    ask_streaming(app)


@cache
def no_white_space() -> dict[str, int]:
    """Grammars allow any amount of it between tokens, and so small a model likes it until it is
    cut off. What the grammar demands is sampled all the same."""
    vocabulary: dict[str, int] = json.loads((DEMO_MODEL_DIR / "tokenizer.json").read_text())[
        "model"
    ]["vocab"]
    spaces = set("ĠĊĉč")  # how a byte-level tokenizer spells blank, newline, tab, return
    return {str(id): -100 for token, id in vocabulary.items() if set(token) <= spaces}


def ask_streaming(app: openai.OpenAI) -> None:
    chunks = list(
        app.chat.completions.create(
            model="demo",
            messages=ASKED,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [finish for finish in finishes if finish] in (["stop"], ["length"])
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0
    assert not any(getattr(chunk, "prompt_token_ids", None) for chunk in chunks)
