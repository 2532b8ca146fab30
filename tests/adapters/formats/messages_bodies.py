"""Bodies of the Messages format and their translations, for the tests."""

from typing import Any

from hypothesis import settings

from fakevllm_adapters.formats.base import EngineInfo, Exchange
from fakevllm_adapters.formats.messages.adapter import CountTokensAdapter, MessagesAdapter

Json = dict[str, Any]
FEW = settings(max_examples=40, deadline=None)
"""Hypothesis settings with few examples and no deadline. Generating a body with many parts is slow,
in particular while many tests run at once."""
MESSAGES = MessagesAdapter()
COUNT = CountTokensAdapter()
TOOL: Json = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
FUNCTION: Json = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
PNG: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
PNG_PART: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}


def body(**fields: Any) -> Json:
    return {"model": "m", "max_tokens": 9, "messages": [user("hi")], **fields}


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def text(words: str, **fields: Any) -> Json:
    return {"type": "text", "text": words, **fields}


def opened(**fields: Any) -> Exchange:
    return MESSAGES.open(body(**fields), EngineInfo())


def chat_body_of(**fields: Any) -> Json:
    return opened(**fields).body


def messages_of(*turns: Json, **fields: Any) -> list[Json]:
    return chat_body_of(messages=list(turns), **fields)["messages"]


def result(content: Any, **fields: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **fields}
