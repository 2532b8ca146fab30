"""Convert requests to conversations in the form that TRL and the chat templates of Hugging Face
models expect. This module does no I/O.

The form differs from requests to /v1/chat/completions:

* The content of a message is a text. Text parts are joined with line breaks, as vLLM joins them.
* The arguments of a tool call are always an object, and never its JSON text. TRL and the templates
  expect an object, and the package `datasets` needs one type in a whole file.
* Reasoning is in the field `reasoning_content`.
* Fields that are null, and fields that no template reads, are left out.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, cast

import orjson

Json = dict[str, Any]

_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field with the text of a content part, by the type of the part."""
_RESERVED_KWARGS = ("add_generation_prompt", "continue_final_message", "tokenize", "chat_template")
"""Arguments of the chat template that a trainer sets itself."""


_LONG_NUMBER = re.compile(r"\d{19}")
"""Digits that may belong to an integer of more than 64 bits."""
_INTEGERS = range(-(2**63), 2**64)
"""Integers that orjson and the package `datasets` read and write exactly."""
_MAX_DIGITS = 20


class NotExported(Exception):
    """Error for a group (a request with its answers) that cannot be written in an export format.
    The message is a slug that names the reason, such as `no_messages`."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages before a model's answer, with the tools and the chat template's arguments."""

    messages: list[Json]
    tools: list[Json]
    """The tools that the model may call; empty if there are none."""
    template_kwargs: Json
    """Further arguments of the chat template, such as `enable_thinking`."""


def conversation_of(body: Json) -> Conversation:
    """Return the conversation of a request to /v1/chat/completions.

    Raises NotExported in each of these cases:

    * The request has no messages.
    * The request has images or other media.
    * The request has tools or tool calls that chat templates do not know.
    * The last message is the beginning of an answer, which the model must continue.
    """
    messages = _objects(body.get("messages"))
    if not messages:
        raise NotExported("no_messages")
    if messages[-1].get("role") == "assistant":
        raise NotExported("continued_answer")
    kwargs = body.get("chat_template_kwargs")
    tools = _objects(body.get("tools"))
    if body.get("functions") or not all(_is_function(tool) for tool in tools):
        raise NotExported("custom_tool")
    return Conversation(
        [chat_message(message) for message in messages],
        tools,
        {
            name: value
            for name, value in cast(Json, kwargs if isinstance(kwargs, dict) else {}).items()
            if name not in _RESERVED_KWARGS
        },
    )


def chat_message(message: Json) -> Json:
    """Return a message in the form that chat templates expect. Raises NotExported if the message
    has media, or a tool call that has no such form.

    >>> parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
    >>> chat_message({"role": "user", "content": parts, "name": None})
    {'role': 'user', 'content': 'Hello\\nyou'}
    """
    if not isinstance(message.get("role"), str):
        raise NotExported("no_messages")
    if message.get("function_call"):  # the form of calls that OpenAI used before tools
        raise NotExported("custom_tool")
    exported: Json = {"role": message["role"], "content": _text(message.get("content"))}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        exported["reasoning_content"] = reasoning
    if calls := _objects(message.get("tool_calls"), "broken_tool_call"):
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
    if call.get("type", "function") != "function":
        raise NotExported("custom_tool")
    if not _is_function(call):
        raise NotExported("broken_tool_call")
    function: Json = call["function"]
    exported: Json = {"type": "function"}
    if call.get("id"):
        exported["id"] = call["id"]
    arguments = _arguments(function.get("arguments"))
    return exported | {"function": {"name": function["name"], "arguments": arguments}}


def _is_function(tool: Json) -> bool:
    """Return True if a tool, or the call of a tool, names a function."""
    function: object = tool.get("function")
    return isinstance(function, dict) and isinstance(cast(Json, function).get("name"), str)


def _arguments(arguments: object) -> Json:
    """Return the arguments of a tool call as an object. Raises NotExported if the arguments are not
    an object, for example because the model wrote invalid JSON. Raises NotExported as well for an
    integer of more than 64 bits, because it would lose digits.

    >>> _arguments('{"a": 1}'), _arguments(""), _arguments(None)
    ({'a': 1}, {}, {})
    """
    if isinstance(arguments, str):
        text = arguments or "{}"
        try:
            arguments = orjson.loads(text)
            if _LONG_NUMBER.search(text):
                json.loads(text, parse_int=_check_integer)
        except (orjson.JSONDecodeError, RecursionError):
            raise NotExported("broken_tool_call") from None
    elif arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise NotExported("broken_tool_call")
    return cast(Json, arguments)


def _check_integer(digits: str) -> None:
    if len(digits.removeprefix("-")) > _MAX_DIGITS or int(digits) not in _INTEGERS:
        raise NotExported("large_integer")


def _objects(value: object, reason: str = "no_messages") -> list[Json]:
    """Return `value` if it is a list of JSON objects, and [] if it is None. For any other value,
    raise NotExported with `reason`."""
    if value is None:
        return []
    if isinstance(value, list):
        items = cast(list[object], value)
        if all(isinstance(item, dict) for item in items):
            return cast(list[Json], items)
    raise NotExported(reason)
