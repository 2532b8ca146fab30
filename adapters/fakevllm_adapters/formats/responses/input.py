"""The input of a Responses request, translated to chat messages by the same rules as in vLLM.

One assistant message may be built from several items, for example reasoning, text and calls.
NotTranslated is raised for input that vLLM would refuse. It is also raised if vLLM would keep only
a part of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from fakevllm_adapters.formats.base import History, Json, NotTranslated
from fakevllm_adapters.formats.responses.refusals import malformed

NAMESPACE_SEPARATOR = "__"
_ROLES = ("user", "system", "developer")
_ANSWER_PARTS = ("output_text", "input_text")
_UNFINISHED = ("in_progress", "incomplete")
_STATUSES = (*_UNFINISHED, "completed", None)

Input = str | list[Any]


def messages_of(instructions: str | None, request_input: Input) -> list[Json]:
    """Translate the instructions and the input of a request to chat messages.

    Raises NotTranslated if no exact translation exists.
    """
    messages: list[Json] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(input_items(request_input)):
        if not isinstance(item, dict):
            raise NotTranslated("an input item that is no object")
        item = cast(Json, item)
        reader = _READERS.get(_type_of(item))
        if reader is None or item.get("status") not in _STATUSES:
            raise NotTranslated(f"an input item of type {_type_of(item)!r}")
        try:
            reader(messages, item)
        except _MalformedItem as malformed_item:
            raise malformed_item.refusal(request_input, index) from None
    return messages


class _MalformedItem(NotTranslated):
    """Error for an input item in which a field is missing or has the wrong type."""

    def __init__(self, item: Json, key: str, kind: str, message: str) -> None:
        """Create the error for the field `key` of an item.

        If the field has a wrong type, `kind` and `message` are pydantic's name and description of
        the problem.
        """
        super().__init__(f"an input item of type {_type_of(item)!r} without {key}")
        self._item = item
        self._key = key
        self._kind = kind
        self._message = message

    def refusal(self, request_input: Input, index: int) -> NotTranslated:
        """Return the exception to raise for this item.

        The exception's error response has two lines of vLLM's response: the first line, and the
        line about this field. vLLM's response also has a line for each other type that the item
        might have had.
        """
        place = ("input", index, _CLASS_NAMES[_type_of(self._item)], self._key)
        text = "Input should be a valid string"
        problems: list[Json] = [
            {"type": "string_type", "loc": ("input",), "msg": text, "input": request_input}
        ]
        if self._key in self._item:
            value: object = self._item[self._key]
            problem: Json = {"type": self._kind, "loc": place, "msg": self._message}
        else:
            value = self._item
            problem = {"type": "missing", "loc": place, "msg": "Field required"}
        return malformed([*problems, problem | {"input": value}])


def continues(request_input: Input) -> bool:
    """Return True if the model must continue the last message instead of answering it.

    The model must continue if the last input item is a message or reasoning, and has the status
    `in_progress` or `incomplete`.
    """
    last: Any = request_input[-1] if isinstance(request_input, list) and request_input else None
    if not isinstance(last, dict):
        return False
    item = cast(Json, last)
    return _type_of(item) in ("message", "reasoning") and item.get("status") in _UNFINISHED


def input_items(request_input: Input) -> list[Any]:
    if isinstance(request_input, str):
        return [{"type": "message", "role": "user", "content": request_input}]
    return request_input


def answer_as_input(message: Json) -> list[Json]:
    """Translate an assistant message to input items, in the form in which an app's next request
    contains it."""
    items: list[Json] = []
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "summary": [], "content": content})
    if message.get("content"):
        items.append({"type": "message", "role": "assistant", "content": message["content"]})
    calls: list[Json] = message.get("tool_calls") or []
    for call in calls:
        item: Json = {"type": "function_call", "call_id": call.get("id")}
        items.append(item | cast(Json, call.get("function") or {}))
    return items


def with_history(body: Json, earlier: History) -> Json:
    """Return `body` with the earlier conversation inserted at the start of its `input`.

    The field previous_response_id is removed. `earlier` has one pair for each earlier request,
    oldest first. A pair consists of the request's body and, in the chat format, the assistant
    message that answered the request. The instructions of earlier requests are left out. Raises
    NotTranslated if the `input` of a request is neither a text nor a list.

    >>> with_history({"input": "b"}, [({"input": "a"}, {"content": "A"})])["input"][1]["content"]
    'A'
    """
    before: list[Any] = []
    for request_input, message in earlier:
        before += [*input_items(_input_of(request_input)), *answer_as_input(message)]
    changed = {key: value for key, value in body.items() if key != "previous_response_id"}
    return changed | {"input": [*before, *input_items(_input_of(body))]}


def _input_of(body: Json) -> Input:
    request_input = body.get("input")
    if not isinstance(request_input, (str, list)):
        raise NotTranslated("an input that is neither text nor a list")
    return cast(Input, request_input)


def _type_of(item: Json) -> str:
    return str(item.get("type", "message" if "role" in item else None))


def _text(item: Json, key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _MalformedItem(item, key, "string_type", "Input should be a valid string")
    return value


def _part_text(part: Json, key: str) -> str:
    value = part.get(key)
    if not isinstance(value, str):
        raise NotTranslated(f"a part of type {part.get('type')!r} without {key}")
    return value


def _message(messages: list[Json], item: Json) -> None:
    role, content = item.get("role"), item.get("content")
    if role == "assistant":
        text = content if isinstance(content, str) else _only_text(content, _ANSWER_PARTS)
        _set(messages, "content", text)
    elif role in _ROLES:
        messages.append({"role": role, "content": _content(item, "content")})
    else:
        expected = "'user', 'assistant', 'system' or 'developer'"
        raise _MalformedItem(item, "role", "literal_error", f"Input should be {expected}")


def _function_call(messages: list[Json], item: Json) -> None:
    name, namespace = _text(item, "name"), item.get("namespace")
    if namespace:
        name = f"{namespace}{NAMESPACE_SEPARATOR}{name}"
    function = {"name": name, "arguments": _text(item, "arguments")}
    call = {"id": _text(item, "call_id"), "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _function_call_output(messages: list[Json], item: Json) -> None:
    content = _content(item, "output")
    messages.append({"role": "tool", "content": content, "tool_call_id": _text(item, "call_id")})


def _reasoning(messages: list[Json], item: Json) -> None:
    if item.get("encrypted_content"):
        raise NotTranslated("encrypted reasoning")
    text = ""
    if item.get("content"):
        text = _only_text(item["content"], ("reasoning_text",))
    elif item.get("summary") != []:
        text = _only_text(item.get("summary"), ("summary_text",))
    _set(messages, "reasoning", text)


_CLASS_NAMES = {
    "message": "EasyInputMessageParam",
    "function_call": "ResponseFunctionToolCallParam",
    "function_call_output": "FunctionCallOutput",
}
"""Names of vLLM's classes, by type of item. vLLM's error messages quote these names."""
_READERS: dict[str, Callable[[list[Json], Json], None]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}


def _set(messages: list[Json], key: str, text: str) -> None:
    """Add `text` under `key` to the last message if it is an assistant message without this key.
    Otherwise append a new assistant message with the key."""
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant" and last.get(key) is None:
        last[key] = text
    else:
        messages.append({"role": "assistant", key: text})


def _only_text(parts: object, types: Sequence[str]) -> str:
    """Return the text of a list that must consist of exactly one text part.

    Raises NotTranslated for anything else, because vLLM would keep only the first part of a longer
    list.
    """
    if not isinstance(parts, list) or len(cast(list[Any], parts)) != 1:
        raise NotTranslated("an assistant's item without a text, or with several")
    part: Any = cast(list[Any], parts)[0]
    if not isinstance(part, dict) or cast(Json, part).get("type") not in types:
        raise NotTranslated("an assistant's item that is no text")
    return _part_text(cast(Json, part), "text")


def _content(item: Json, key: str) -> str | list[Json]:
    content = item.get(key)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _MalformedItem(item, key, "string_type", "Input should be a valid string")
    return [_part(part) for part in cast(list[Any], content)]


def _part(part: object) -> Json:
    kind = cast(Json, part).get("type") if isinstance(part, dict) else None
    if kind == "input_text":
        return {"type": "text", "text": _part_text(cast(Json, part), "text")}
    if kind == "input_image":
        url = _part_text(cast(Json, part), "image_url")
        return {"type": "image_url", "image_url": {"url": url}}
    raise NotTranslated(f"a part of type {kind!r}")
