"""Messages of requests and answers in the form of the GenAI semantic conventions: a role, and parts
of several types. This module does no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import orjson

Part = dict[str, Any]

MAX_CONTENT_CHARS = 2**18
"""Maximum number of characters of an attribute with content. A longer one is left out, because
collectors limit the size of a request (the usual limit is 20 MiB)."""
_REASONING = ("reasoning_content", "reasoning")
"""Fields of an assistant message that may have its reasoning."""


def input_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages of a request, or its prompt, in the form of the conventions.

    >>> input_messages([{"role": "user", "content": "Hi"}])
    [{'role': 'user', 'parts': [{'type': 'text', 'content': 'Hi'}]}]
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return [_message(one) for one in _objects(messages)]


def output_messages(message: Mapping[str, Any], finish_reason: str | None) -> list[dict[str, Any]]:
    """Return an answer in the form of the conventions."""
    role_and_parts = _message({"role": "assistant", **message})
    return [role_and_parts | {"finish_reason": finish_reason or ""}]


def content_json(messages: Sequence[object]) -> str | None:
    """Return messages as JSON, or None if there are none or the text is too long."""
    if not messages:
        return None
    text = orjson.dumps(messages).decode()
    return text if len(text) <= MAX_CONTENT_CHARS else None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": str(message.get("role") or "user"), "parts": list(_parts(message))}


def _parts(message: Mapping[str, Any]) -> Iterator[Part]:
    for name in _REASONING:
        if isinstance(text := message.get(name), str) and text:
            yield {"type": "reasoning", "content": text}
            break
    content: object = message.get("content")
    if message.get("role") == "tool":
        yield {
            "type": "tool_call_response",
            "id": message.get("tool_call_id"),
            "response": content,
        }
    elif isinstance(content, str):
        if content:
            yield {"type": "text", "content": content}
    else:
        yield from map(_content_part, _objects(content))
    for call in _objects(message.get("tool_calls")):
        function: object = call.get("function")
        own = cast("dict[str, Any]", function) if isinstance(function, dict) else {}
        yield {
            "type": "tool_call",
            "id": call.get("id"),
            "name": own.get("name"),
            "arguments": own.get("arguments"),
        }


def _content_part(part: Mapping[str, Any]) -> Part:
    if isinstance(text := part.get("text"), str):
        return {"type": "text", "content": text}
    # Of images, sounds and files, only the type is kept: their bytes would be larger than the rest.
    return {"type": str(part.get("type"))}


def _objects(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        return []
    return [
        cast("dict[str, Any]", one) for one in cast("list[object]", value) if isinstance(one, dict)
    ]
