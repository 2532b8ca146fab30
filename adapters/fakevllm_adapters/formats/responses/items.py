"""The output items of a Responses answer, key by key as vLLM writes them.

The key order, and the nulls, are those of the types of openai 3.52, which vLLM writes with.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, cast

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.formats.responses.dialect import Dialect
from fakevllm_adapters.formats.responses.tools import CallName, Tools

COMPLETED = "completed"
INCOMPLETE = "incomplete"
IN_PROGRESS = "in_progress"


def new_id(prefix: str) -> str:
    """As vLLM makes them: 16 hex digits."""
    return prefix + secrets.token_hex(8)


def text_part(text: str, logprobs: list[Json] | None) -> Json:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def reasoning_part(text: str) -> Json:
    return {"text": text, "type": "reasoning_text"}


def message_item(item_id: str, parts: list[Json], status: str) -> Json:
    item: Json = {"id": item_id, "content": parts, "role": "assistant", "status": status}
    return item | {"type": "message", "phase": None}


def reasoning_item(item_id: str, parts: list[Json] | None, status: str | None) -> Json:
    item: Json = {"id": item_id, "summary": [], "type": "reasoning", "content": parts}
    return item | {"encrypted_content": None, "status": status}


def call_item(item_id: str, call_id: str, name: CallName, arguments: str, status: str) -> Json:
    item: Json = {"arguments": arguments, "call_id": call_id, "name": name.name}
    item |= {"type": "function_call", "id": item_id, "async": None, "caller": None}
    return item | {"namespace": name.namespace, "status": status}


def items_of_message(
    message: Json, logprobs: list[Json] | None, tools: Tools, dialect: Dialect, is_cut: bool
) -> list[Json]:
    """The items of a whole answer. `is_cut`: its limit ended it."""
    items: list[Json] = []
    last = INCOMPLETE if is_cut and dialect.tells_cut else COMPLETED
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
    """The chat format's logprobs of a choice, as the Responses format writes them."""
    logprobs = choice.get("logprobs")
    content: Any = cast(Json, logprobs).get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list):
        return None
    found: list[Json] = []
    for token in cast(list[Json], content):
        tops: list[Json] = token.get("top_logprobs") or []
        found.append(_logprob(token) | {"top_logprobs": [_logprob(top) for top in tops]})
    return found


def streamed_logprobs(logprobs: Sequence[Json]) -> list[Json]:
    """The same in a stream's deltas, which leave the bytes away."""
    return [
        _without_bytes(token)
        | {"top_logprobs": [_without_bytes(top) for top in token["top_logprobs"]]}
        for token in logprobs
    ]


def _logprob(token: Json) -> Json:
    text: str = token["token"]
    written = token.get("bytes")
    if written is None:
        written = list(text.encode(errors="replace"))
    return {"token": text, "bytes": written, "logprob": token["logprob"]}


def _without_bytes(token: Json) -> Json:
    return {"token": token["token"], "logprob": token["logprob"]}
