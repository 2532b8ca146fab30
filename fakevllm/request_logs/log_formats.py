"""Find the request and its answer in an entry of a log. This module does no I/O.

An entry has one of these shapes:

* the body of a request: `{"model": …, "messages": […]}` or `{"model": …, "input": …}`
* a request with its response: `{"request": {…}, "response": {…}}`
* a stored chat completion with its messages: `{"object": "chat.completion", "messages": […],
  "choices": […]}`
* a line of the input of a batch: `{"custom_id": …, "url": "/v1/chat/completions", "body": {…}}`
* a line of a file for fine-tuning: `{"messages": […]}`, whose last message is the answer
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from fakevllm.admission.row_requests import REQUEST_FIELDS
from fakevllm_adapters.formats.base import EngineInfo, NotTranslated
from fakevllm_adapters.formats.registry import ADAPTERS

Json = dict[str, Any]

_NOT_SENT = ("weight",)
"""Fields of a message that only files for fine-tuning have."""


class NotImported(Exception):
    """Raised if an entry gives no row. The message is the slug of the reason."""


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
    """Return the row of a dataset for an entry of a log. Its field `question` is the last user
    message, `messages` and `tools` are the request, and `answer` is the text of the logged answer.

    Raises NotImported if the entry has no request that can be sent to a chat model.

    >>> row_of({"messages": [{"role": "user", "content": "2+2?"},
    ...                      {"role": "assistant", "content": "4"}]})
    {'question': '2+2?', 'messages': [{'role': 'user', 'content': '2+2?'}], 'answer': '4'}
    """
    logged = _logged_request(entry)
    body = _chat_body(logged)
    messages = [_without(message) for message in _messages(body.get("messages"))]
    answer = _text(_answered(logged.response))
    if messages[-1].get("role") == "assistant":
        last = messages.pop()
        answer = answer if answer is not None else _text(last)
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
    url, body = fields.get("url"), fields.get("body")
    if isinstance(body, dict):  # a line of a batch's input
        path = url if isinstance(url, str) else ADAPTERS["chat"].path
        return _LoggedRequest(path, cast(Json, body), {})
    request, response = fields.get("request"), fields.get("response")
    if isinstance(request, dict):
        fields = cast(Json, request)
        response = cast(Json, response) if isinstance(response, dict) else {}
    else:
        response = fields
    body_name = "chat" if "messages" in fields else "responses" if "input" in fields else None
    if body_name is None:
        raise NotImported("no_messages" if "choices" in fields else "no_request")
    return _LoggedRequest(ADAPTERS[body_name].path, fields, response)


def _chat_body(logged: _LoggedRequest) -> Json:
    adapter = next((one for one in ADAPTERS.values() if one.path == logged.path), None)
    if adapter is None or adapter.upstream_path != ADAPTERS["chat"].path:
        raise NotImported("other_route")
    if logged.body.get("previous_response_id") is not None:
        raise NotImported("previous_response")
    try:
        return adapter.open(logged.body, EngineInfo()).body
    except NotTranslated:
        raise NotImported("not_translated") from None


def _messages(value: object) -> list[Json]:
    if not isinstance(value, list) or not value:
        raise NotImported("no_messages")
    messages = cast(list[object], value)
    if not all(isinstance(one, dict) and "role" in one for one in messages):
        raise NotImported("no_messages")
    return cast(list[Json], messages)


def _without(message: Json) -> Json:
    return {key: value for key, value in message.items() if key not in _NOT_SENT}


def _answered(response: Json) -> Json | None:
    """Return the message of a response in the format of chat completions; None for others."""
    choices: object = response.get("choices")
    first = next(iter(cast(list[object], choices)), None) if isinstance(choices, list) else None
    message = cast(Json, first).get("message") if isinstance(first, dict) else None
    return cast(Json, message) if isinstance(message, dict) else None


def _text(message: Json | None) -> str | None:
    content = None if message is None else message.get("content")
    return content if isinstance(content, str) else None
