"""The variants of chat requests that an openai client can send to the demo's model."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR

QUESTION = "What is 2 plus 3?"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
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


def send_each_variant(app: openai.OpenAI) -> None:
    create = app.chat.completions.create
    auto = create(model="demo", messages=MESSAGES, tools=[ADD], max_tokens=24)
    assert auto.choices[0].finish_reason in ("stop", "length", "tool_calls")
    named: Any = {"type": "function", "function": {"name": "add"}}
    for tool_choice in (named, "required"):
        reply = create(
            model="demo",
            messages=MESSAGES,
            tools=[ADD],
            tool_choice=tool_choice,
            max_tokens=100,
            logit_bias=forbid_white_space(),
        )
        assert reply.choices[0].message.tool_calls, reply
        for call in reply.choices[0].message.tool_calls:
            assert call.type == "function" and call.function.name == "add"
            assert set(json.loads(call.function.arguments)) == {"a", "b"}
    structured = create(
        model="demo",
        messages=MESSAGES,
        response_format=SCHEMA,
        max_tokens=100,
        logit_bias=forbid_white_space(),
    )
    assert json.loads(structured.choices[0].message.content or "")["sum"] in (4, 5, 6)
    scored = create(model="demo", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=24)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and scored.usage is not None
    assert len(logprobs.content) == scored.usage.completion_tokens
    assert all(len(token.top_logprobs) >= 2 for token in logprobs.content)
    send_streaming(app)


@cache
def forbid_white_space() -> dict[str, int]:
    """Return a `logit_bias` against tokens of white space.

    Grammars allow any amount of white space between tokens. A model as small as the demo's model
    would sample white space until the answer is cut off. White space that the grammar requires is
    still sampled.
    """
    vocabulary: dict[str, int] = json.loads((DEMO_MODEL_DIR / "tokenizer.json").read_text())[
        "model"
    ]["vocab"]
    spaces = set("ĠĊĉč")  # blank, newline, tab and return in a byte-level vocabulary
    return {str(id): -100 for token, id in vocabulary.items() if set(token) <= spaces}


def send_streaming(app: openai.OpenAI) -> None:
    chunks = list(
        app.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [finish for finish in finishes if finish] in (["stop"], ["length"])
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0
    assert not any(getattr(chunk, "prompt_token_ids", None) for chunk in chunks)
