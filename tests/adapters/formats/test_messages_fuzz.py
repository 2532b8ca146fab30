import json
from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.formats.base import EngineInfo, NotTranslated
from tests.adapters.formats.messages_bodies import (
    COUNT,
    FEW,
    MESSAGES,
    TOOL,
    Json,
    messages_of,
    opened,
    text,
    user,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=4,
)
BLOCK_KINDS = ["text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "zz"]
ODD_BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(BLOCK_KINDS) | JSON},
    optional={
        "text": st.text(max_size=4) | JSON,
        "source": st.dictionaries(st.sampled_from(["type", "url", "data"]), JSON) | JSON,
        "content": st.lists(
            st.dictionaries(st.sampled_from(["type", "text", "source", "name"]), JSON), max_size=3
        )
        | JSON,
        "input": st.dictionaries(st.text(max_size=3), JSON) | JSON,
        "thinking": st.text(max_size=4) | JSON,
        "id": JSON,
        "name": JSON,
    },
)
ODD_TURN = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": st.lists(ODD_BLOCK, max_size=3) | JSON,
    }
)
ODD_BODY = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("m") | JSON,
        "max_tokens": st.just(5) | JSON,
        "messages": st.lists(ODD_TURN, max_size=3) | JSON,
        "system": st.lists(ODD_BLOCK, max_size=3) | JSON,
        "tools": st.lists(st.just(TOOL) | JSON, max_size=2) | JSON,
        "tool_choice": st.fixed_dictionaries({"type": st.just("any") | JSON}) | JSON,
        "output_config": JSON,
        "stop_sequences": JSON,
        "stream": JSON,
    },
)


@FEW
@given(ODD_BODY | st.dictionaries(st.text(max_size=5), JSON))
def test_an_odd_body_is_translated_or_raises_not_translated(odd: Json) -> None:
    for adapter in (MESSAGES, COUNT):
        try:
            exchange = adapter.open(odd, EngineInfo())
        except NotTranslated as reason:
            assert str(reason)
        else:
            assert isinstance(exchange.body["messages"], list)


def test_a_body_that_nests_too_deep_to_serialize_raises_not_translated() -> None:
    deep: Json = {}
    for _ in range(5000):
        deep = {"a": deep}
    blocks = [{"type": "tool_use", "id": "t", "name": "n", "input": deep}]
    with pytest.raises(NotTranslated, match="nested too deep"):
        opened(messages=[{"role": "assistant", "content": blocks}])


WORDS = st.text(min_size=1, max_size=12)
NAMES = st.text("abcdef", min_size=1, max_size=6)


def block(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({"type": st.just(kind)} | fields)


USE = block("tool_use", id=NAMES, name=NAMES, input=st.dictionaries(NAMES, JSON, max_size=3))
TEXT = block("text", text=WORDS)
THOUGHT = block("thinking", thinking=WORDS, signature=st.just("s"))
RESULT = block(
    "tool_result", tool_use_id=NAMES, content=WORDS | st.lists(TEXT, min_size=1, max_size=3)
)
ASSISTANT = st.lists(TEXT | THOUGHT | USE, min_size=1, max_size=4)
USER = WORDS | st.lists(TEXT | RESULT, min_size=1, max_size=4)


def turns_of(pairs: list[tuple[Any, list[Json]]]) -> list[Json]:
    return [
        turn
        for block, done in pairs
        for turn in (user(block), {"role": "assistant", "content": done})
    ]


CONVERSATION = st.lists(st.tuples(USER, ASSISTANT), min_size=1, max_size=4).map(turns_of)


@FEW
@given(CONVERSATION)
def test_every_text_reasoning_id_and_argument_reaches_the_chat_request(
    turns: list[Json],
) -> None:
    before = orjson.dumps(turns)
    chat = messages_of(*turns)
    assert orjson.dumps(turns) == before
    assert contents_of_chat(chat) == contents_of_blocks(turns)


def contents_of_blocks(turns: list[Json]) -> dict[str, list[Any]]:
    """Return the contents of the blocks by kind, in order."""
    meant: dict[str, list[Any]] = {kind: [] for kind in ("user", "assistant", "tool", "use")}
    thoughts = ""
    for role, block in [(turn["role"], block) for turn in turns for block in blocks_of(turn)]:
        if block["type"] == "text":
            meant[role].append(block["text"])
        elif block["type"] == "thinking":
            thoughts += block["thinking"]
        elif block["type"] == "tool_use":
            meant["use"].append((block["id"], block["name"], block["input"]))
        else:
            texts = [inner["text"] for inner in blocks_of(block)]
            meant["tool"].append((block["tool_use_id"], "\n".join(texts)))
    return meant | {"reasoning": [thoughts]}


def blocks_of(holder: Json) -> list[Json]:
    content = holder["content"]
    return [text(content)] if isinstance(content, str) else content


def contents_of_chat(chat: list[Json]) -> dict[str, list[Any]]:
    contents: dict[str, list[Any]] = {kind: [] for kind in ("user", "assistant", "tool", "use")}
    for message in chat:
        if message["role"] == "tool":
            contents["tool"].append((message["tool_call_id"], message["content"]))
        else:
            contents[message["role"]] += texts_in(message)
        for use in message.get("tool_calls", []):
            function: Mapping[str, str] = use["function"]
            arguments = json.loads(function["arguments"])
            contents["use"].append((use["id"], function["name"], arguments))
    thoughts = "".join(message.get("reasoning", "") for message in chat)
    return contents | {"reasoning": [thoughts]}


def texts_in(message: Json) -> list[str]:
    content = message.get("content", [])
    return [content] if isinstance(content, str) else [part["text"] for part in content]
