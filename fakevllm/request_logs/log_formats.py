"""Find the request and its answer in an entry of a log. This module does no I/O.

An entry has one of these shapes:

* the body of a request: `{"model": …, "messages": […]}` or `{"model": …, "input": …}`. Requests to
  Anthropic's Messages API also have `messages`. They are recognised by fields that only this API
  has.
* a request with its response: `{"request": {…}, "response": {…}}`
* a stored chat completion with its messages: `{"object": "chat.completion", "messages": […],
  "choices": […]}`
* a line of a batch's input file:
  `{"custom_id": …, "url": "/v1/chat/completions", "body": {…}}`. In a batch for Anthropic, the line
  has `params` in place of `body`.
* a line of a fine-tuning file: `{"messages": […]}`. The last message is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from fakevllm.admission.row_requests import REQUEST_FIELDS
from fakevllm_adapters.formats.base import EngineInfo, NotTranslated
from fakevllm_adapters.formats.chat import text_of
from fakevllm_adapters.formats.registry import ADAPTERS

Json = dict[str, Any]

_NOT_SENT = ("weight",)
"""Fields of a message that only files for fine-tuning have. They are not copied to the row."""
_ROUTES = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}
"""For each adapter (API format), by name: the end of the URL path of its requests. The beginning of
the path differs from provider to provider."""
_ANTHROPIC_FIELDS = {"system", "stop_sequences", "anthropic_version"}
"""Fields that requests to Anthropic's Messages API may have, and that requests to OpenAI's API
never have."""
_ANTHROPIC_BLOCKS = {
    "tool_use",
    "tool_result",
    "thinking",
    "redacted_thinking",
    "image",
    "document",
}
"""Types of content blocks that only Anthropic's Messages API has."""
_ANTHROPIC_REQUIRED: Json = {"model": "unknown", "max_tokens": 1}
"""Values for fields that the adapter of Anthropic's API needs and a log may lack. These values are
not copied to the row."""


class NotImported(Exception):
    """Raised if no row can be made from a log entry. The message is a short name of the reason."""


@dataclass(frozen=True, slots=True)
class _LoggedRequest:
    path: str
    """Route of the request."""
    body: Json
    response: Json
    """Body of the response; empty if it is not in the log."""


def entries_of(value: object) -> Iterator[object]:
    """Yield the entries of a line of a log. A line may be one entry, a list of entries, or a page
    of a list, as OpenAI's API returns it.

    >>> list(entries_of({"object": "list", "data": [{"id": 1}, {"id": 2}]}))
    [{'id': 1}, {'id': 2}]
    """
    if isinstance(value, dict):
        fields = cast(Json, value)
        is_page = fields.get("object") == "list" and isinstance(fields.get("data"), list)
        value = fields["data"] if is_page else [fields]
    yield from cast(list[object], value if isinstance(value, list) else [value])


def row_of(entry: object) -> Json:
    """Return the row of a dataset for an entry of a log. The row's field `question` is the last
    user message, and `answer` is the text of the logged answer. The fields `messages` and `tools`
    are taken from the request.

    Raises NotImported if the entry has no request that can be sent to a chat model.

    >>> row_of({"messages": [{"role": "user", "content": "2+2?"},
    ...                      {"role": "assistant", "content": "4"}]})
    {'question': '2+2?', 'messages': [{'role': 'user', 'content': '2+2?'}], 'answer': '4'}
    """
    logged = _logged_request(entry)
    body = _chat_body(logged)
    messages = [_without(message) for message in _messages(body.get("messages"))]
    answer = _answer(logged.response)
    if messages[-1].get("role") == "assistant":
        last = text_of(messages.pop().get("content")) or None
        if answer not in (None, last):  # the request begins the answer of the response
            raise NotImported("continued_answer")
        answer = last
    if not messages:
        raise NotImported("no_messages")
    if messages[-1].get("role") == "assistant":
        raise NotImported("continued_answer")
    request: Json = body | {"messages": messages}
    question = ADAPTERS["chat"].question(request)
    if not question.strip():
        raise NotImported("no_user_text")
    kept = {name: request[name] for name in REQUEST_FIELDS if request.get(name) is not None}
    row: Json = {"question": question, **kept}
    return row if answer is None else row | {"answer": answer}


def _logged_request(entry: object) -> _LoggedRequest:
    if not isinstance(entry, dict):
        raise NotImported("no_request")
    fields = cast(Json, entry)
    request = _object(fields.get("request"))
    response = _object(fields.get("response"))
    if request is None:
        request = fields
        response = fields if response is None else response
    response = _body_of(response or {})
    url, body = request.get("url"), _body_of(request)
    if isinstance(url, str) and body is not request:
        return _LoggedRequest(_path(url), body, response)
    if "messages" in body:
        name = "messages" if _is_anthropic(body, response) else "chat"
    elif "input" in body:
        name = "responses"
    else:
        raise NotImported("no_messages" if "choices" in body else "no_request")
    return _LoggedRequest(ADAPTERS[name].path, body, response)


def _path(url: str) -> str:
    try:
        return urlsplit(url).path
    except ValueError:
        raise NotImported("other_route") from None


def _body_of(fields: Json) -> Json:
    """Return the body of a request or response from a log entry that may also have a URL or a
    status. If the entry has no separate body, return `fields`."""
    bodies = (_object(fields.get(name)) for name in ("body", "params"))
    return next((body for body in bodies if body is not None), fields)


def _is_anthropic(body: Json, response: Json) -> bool:
    """Return True for a request to Anthropic's Messages API. Such a request is recognized by its
    response, or by fields that only Anthropic's API has. A body without such fields means the same
    in OpenAI's chat format, and counts as a request to OpenAI's API."""
    tools = _items(body.get("tools"))
    blocks = [
        block for message in _items(body["messages"]) for block in _items(message.get("content"))
    ]
    return (
        response.get("type") == "message"
        or not _ANTHROPIC_FIELDS.isdisjoint(body)
        or any("input_schema" in tool for tool in tools)
        or any(block.get("type") in _ANTHROPIC_BLOCKS for block in blocks)
    )


def _chat_body(logged: _LoggedRequest) -> Json:
    routes = (name for name, end in _ROUTES.items() if logged.path.rstrip("/").endswith(end))
    adapter = ADAPTERS.get(next(routes, ""))
    if adapter is None:
        raise NotImported("other_route")
    if logged.body.get("functions"):  # the form of tools that OpenAI used before `tools`
        raise NotImported("not_translated")
    if logged.body.get("previous_response_id") is not None:
        raise NotImported("previous_response")
    is_anthropic = adapter is ADAPTERS["messages"]
    required = _ANTHROPIC_REQUIRED if is_anthropic else {}
    try:
        body = adapter.open(required | logged.body, EngineInfo()).body
    except NotTranslated:
        raise NotImported("not_translated") from None
    added = required.keys() - logged.body.keys()
    return {name: value for name, value in body.items() if name not in added}


def _messages(value: object) -> list[Json]:
    if not isinstance(value, list) or not value:
        raise NotImported("no_messages")
    messages = cast(list[object], value)
    if not all(isinstance(one, dict) and "role" in one for one in messages):
        raise NotImported("no_messages")
    return cast(list[Json], messages)


def _without(message: Json) -> Json:
    return {key: value for key, value in message.items() if key not in _NOT_SENT}


def _answer(response: Json) -> str | None:
    """Return the text of a response of Chat Completions, Responses or Anthropic's Messages API, or
    None if the response has no text."""
    choices = _items(response.get("choices"))
    message = _object(choices[0].get("message")) if choices else None
    if message is not None:
        content: object = message.get("content")
    elif response.get("object") == "response":
        output = _items(response.get("output"))
        items = [item for item in output if item.get("type") == "message"]
        content = [part for item in items for part in _items(item.get("content"))]
    else:
        content = response.get("content") if response.get("type") == "message" else None
    return text_of(content) or None


def _object(value: object) -> Json | None:
    return cast(Json, value) if isinstance(value, dict) else None


def _items(value: object) -> list[Json]:
    """Return the JSON objects in a list. Return an empty list if `value` is not a list."""
    items = cast(list[object], value) if isinstance(value, list) else []
    return [cast(Json, item) for item in items if isinstance(item, dict)]
