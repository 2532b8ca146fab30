"""The output items of a response, with the same keys as in vLLM's responses.

vLLM serializes the types of the Python package openai 3.52. These types decide the order of the
keys, and which keys are written as null.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, cast

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.formats.responses.tools import CallName, Tools
from fakevllm_adapters.formats.vllm_versions import Dialect

COMPLETED = "completed"
INCOMPLETE = "incomplete"
IN_PROGRESS = "in_progress"


def new_id(prefix: str) -> str:
    """Return a random id in vLLM's form, which is the prefix followed by 16 hex digits."""
    return prefix + secrets.token_hex(8)


def text_part(text: str, logprobs: list[Json] | None) -> Json:
    """Build the text part of a message item (a message in the output of a response)."""
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def reasoning_part(text: str) -> Json:
    """Build the text part of a reasoning item (the reasoning in the output of a response)."""
    return {"text": text, "type": "reasoning_text"}


def message_item(item_id: str, parts: list[Json], status: str) -> Json:
    """Build the output item that contains a message of the model."""
    item: Json = {"id": item_id, "content": parts, "role": "assistant", "status": status}
    return item | {"type": "message", "phase": None}


def reasoning_item(item_id: str, parts: list[Json] | None, status: str | None) -> Json:
    """Build the output item that contains the model's reasoning."""
    item: Json = {"id": item_id, "summary": [], "type": "reasoning", "content": parts}
    return item | {"encrypted_content": None, "status": status}


def call_item(item_id: str, call_id: str, name: CallName, arguments: str, status: str) -> Json:
    """Build the output item that contains a function call of the model."""
    item: Json = {"arguments": arguments, "call_id": call_id, "name": name.name}
    item |= {"type": "function_call", "id": item_id, "async": None, "caller": None}
    return item | {"namespace": name.namespace, "status": status}


def output_items(
    message: Json, logprobs: list[Json] | None, tools: Tools, dialect: Dialect, is_cut: bool
) -> list[Json]:
    """Translate an assistant message to output items.

    `is_cut` is True if the token limit ended the message.
    """
    items: list[Json] = []
    last = INCOMPLETE if is_cut and dialect.marks_incomplete else COMPLETED
    calls: list[Json] = message.get("tool_calls") or []
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        items.append(reasoning_item(new_id("rs_"), [reasoning_part(reasoning)], None))
    if message.get("content"):
        parts = [text_part(message["content"], logprobs)]
        items.append(message_item(new_id("msg_"), parts, COMPLETED if calls else last))
    for call in calls:
        function: Json = call["function"]
        name, call_id = tools.call_name(function["name"]), call.get("id") or new_id("call_")
        status = last if call is calls[-1] else COMPLETED
        items.append(call_item(new_id("fc_"), call_id, name, function["arguments"], status))
    return items


def logprobs_of(choice: Json) -> list[Json] | None:
    """Translate the logprobs of a chat completion's choice to the Responses format. Return None if
    there are none."""
    logprobs = choice.get("logprobs")
    content: Any = cast(Json, logprobs).get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list):
        return None
    translated: list[Json] = []
    for token in cast(list[Json], content):
        tops: list[Json] = token.get("top_logprobs") or []
        translated.append(_logprob(token) | {"top_logprobs": [_logprob(top) for top in tops]})
    return translated


def streamed_logprobs(logprobs: Sequence[Json]) -> list[Json]:
    """Return logprobs in the form that a stream's delta events have. This form omits the bytes of
    each token."""
    return [
        _without_bytes(token)
        | {"top_logprobs": [_without_bytes(top) for top in token["top_logprobs"]]}
        for token in logprobs
    ]


def _logprob(token: Json) -> Json:
    text: str = token["token"]
    token_bytes = token.get("bytes")
    if token_bytes is None:
        token_bytes = list(text.encode(errors="replace"))
    return {"token": text, "bytes": token_bytes, "logprob": token["logprob"]}


def _without_bytes(token: Json) -> Json:
    return {"token": token["token"], "logprob": token["logprob"]}
