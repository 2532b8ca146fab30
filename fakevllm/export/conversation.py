"""Conversations in the form that the chat templates of Hugging Face models, and TRL, expect. This
module does no I/O.

The form differs from requests to /v1/chat/completions:

* The content of a message is a text. Text parts are joined with line breaks, as vLLM joins them.
* The arguments of a tool call are an object, and not its JSON text.
* Reasoning is in the field `reasoning_content`.
* Fields that are null, and fields that no template reads, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import orjson

Json = dict[str, Any]

_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field with the text of a content part, by the type of the part."""
_RESERVED_KWARGS = ("add_generation_prompt", "continue_final_message", "tokenize", "chat_template")
"""Arguments of the chat template that a trainer sets itself."""


class NotExported(Exception):
    """Raised if a group has no row in a format. The message is the slug of the reason."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation before an answer."""

    messages: list[Json]
    tools: list[Json]
    """The tools that the model may call; empty if there are none."""
    template_kwargs: Json
    """Further arguments of the chat template, such as `enable_thinking`."""


def conversation_of(body: Json) -> Conversation:
    """Return the conversation of a request to /v1/chat/completions.

    Raises NotExported if the request has no messages, if it has images or other media, or if the
    model was to continue an answer that the request begins.
    """
    messages = _objects(body.get("messages"))
    if not messages:
        raise NotExported("no_messages")
    if messages[-1].get("role") == "assistant":
        raise NotExported("continued_answer")
    kwargs = body.get("chat_template_kwargs")
    return Conversation(
        [chat_message(message) for message in messages],
        _objects(body.get("tools")),
        {
            name: value
            for name, value in cast(Json, kwargs if isinstance(kwargs, dict) else {}).items()
            if name not in _RESERVED_KWARGS
        },
    )


def chat_message(message: Json) -> Json:
    """Return a message in the form that chat templates expect. Raises NotExported if the message
    has media.

    >>> parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
    >>> chat_message({"role": "user", "content": parts, "name": None})
    {'role': 'user', 'content': 'Hello\\nyou'}
    """
    exported: Json = {"role": message["role"], "content": _text(message.get("content"))}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        exported["reasoning_content"] = reasoning
    if calls := _objects(message.get("tool_calls")):
        exported["tool_calls"] = [_tool_call(call) for call in calls]
    for name in ("tool_call_id", "name"):
        if isinstance(message.get(name), str):
            exported[name] = message[name]
    return exported


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise NotExported("media")
    texts: list[str] = []
    for part in cast(list[object], content):
        fields = cast(Json, part if isinstance(part, dict) else {"type": "text", "text": part})
        text = fields.get(_TEXT_FIELDS.get(str(fields.get("type")), ""))
        if not isinstance(text, str):
            raise NotExported("media")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: Json) -> Json:
    function: Json = call["function"]
    exported: Json = {"type": "function"}
    if call.get("id"):
        exported["id"] = call["id"]
    arguments = _arguments(function.get("arguments"))
    return exported | {"function": {"name": function["name"], "arguments": arguments}}


def _arguments(arguments: object) -> object:
    """Return the arguments of a tool call as an object. If their text is no JSON object, return the
    text, so that the message is what the model wrote.

    >>> _arguments('{"a": 1}'), _arguments('{"a": '), _arguments("")
    ({'a': 1}, '{"a": ', {})
    """
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        parsed: object = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return arguments
    return cast(Json, parsed) if isinstance(parsed, dict) else arguments


def _objects(value: object) -> list[Json]:
    """Return a list of JSON objects; an empty list for None.

    Raises TypeError for a value of another type, which no request in the ledger has.
    """
    if value is None:
        return []
    if isinstance(value, list):
        items = cast(list[object], value)
        if all(isinstance(item, dict) for item in items):
            return cast(list[Json], items)
    raise TypeError("a list of objects was expected")
