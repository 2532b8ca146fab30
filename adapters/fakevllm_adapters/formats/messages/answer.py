"""Responses and errors of /v1/messages, translated from chat completions in the same way as in
vLLM.

Keys are in the same order as in vLLM's responses. Like vLLM, the functions leave out keys without a
value instead of writing null.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, cast

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.formats.vllm_versions import Dialect

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""The stop_reason of a Messages response for each finish_reason of a chat completion. For any other
finish_reason, the response has no stop_reason. An answer that ended at a stop string has the
stop_reason `end_turn` too."""

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def new_signature() -> str:
    """Return a new signature for a thinking block.

    Clients send the signature back with the block. Signatures are never checked.
    """
    return secrets.token_hex(16)


def as_object(value: object) -> Json:
    """Return a JSON object (dict) unchanged, and {} for any other value."""
    return cast(Json, value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return a JSON list unchanged, and [] for any other value."""
    return cast(list[Any], value) if isinstance(value, list) else []


def reasoning_of(message: Json) -> object:
    """Return the reasoning text of a message or delta, from the key `reasoning` or
    `reasoning_content`.

    Older engines use the key `reasoning_content`.
    """
    reasoning = message.get("reasoning")
    return message.get("reasoning_content") if reasoning is None else reasoning


def usage_counts(chat_usage: object) -> Json:
    """Translate the usage of a chat completion to Anthropic's `usage`.

    vLLM's prompt_tokens include cached tokens. Anthropic's input_tokens exclude cached tokens.
    """
    counts = as_object(chat_usage)
    details = as_object(counts.get("prompt_tokens_details"))
    created, read = details.get("created_cache_tokens"), details.get("cached_tokens")
    uncached = _count(counts.get("prompt_tokens")) - _count(created) - _count(read)
    usage: Json = {
        "input_tokens": max(0, uncached),
        "output_tokens": _count(counts.get("completion_tokens")),
    }
    if created is not None:
        usage["cache_creation_input_tokens"] = created
    if read is not None:
        usage["cache_read_input_tokens"] = read
    return usage


def message_of(completion: Json) -> Json:
    """Translate a chat completion to a response in Anthropic's format.

    Raises ValueError if the completion has no answer, or if the arguments of a tool call are not a
    JSON object. In both cases vLLM answers with status 500.
    """
    choices = as_list(completion.get("choices"))
    if not choices or "message" not in as_object(choices[0]):
        raise ValueError("the answer has no choices")
    choice = as_object(choices[0])
    message: Json = {
        "id": completion.get("id"),
        "type": "message",
        "role": "assistant",
        "content": _content(as_object(choice["message"])),
        "model": completion.get("model"),
    }
    stop_reason = STOP_REASONS.get(str(choice.get("finish_reason")))
    if stop_reason is not None:
        message["stop_reason"] = stop_reason
    message["usage"] = usage_counts(completion.get("usage"))
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if completion.get(name) is not None:
            message[name] = completion[name]
    return message


def has_valid_calls(message: Json) -> bool:
    """Return True if the arguments of every tool call in a message are a JSON object. The result is
    False if the token limit cut off a call."""
    try:
        to_json({"content": _content(message)})
    except ValueError:
        return False
    return True


def to_json(value: Json) -> bytes:
    """Return a value as JSON in UTF-8, encoded exactly as vLLM's web framework does it.

    Unlike orjson, this function also writes integers of more than 64 bits. Raises ValueError for
    values that JSON cannot express.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("the answer is nested too deep") from None
    return text.encode()


def refusal_of(status: int, body: Json) -> Json:
    """Translate an error body from vLLM's form to Anthropic's form.

    Errors of vLLM's web framework are returned unchanged, because vLLM does not translate them at
    /v1/messages. Examples are the errors for a malformed body, an unknown key or an unknown path.
    """
    error = as_object(body.get("error"))
    if not error or error.get("type") == "Bad Request":
        return body
    return _error(error_type(status), error)


def stream_error(body: Json, dialect: Dialect) -> Json:
    """Translate an error of the engine to the error event of a Messages stream.

    `body` is an error body of vLLM. vLLM's web framework and vLLM's serving classes write error
    bodies in different forms. This function accepts both forms.
    """
    content = body.get("error", body.get("detail"))
    error = as_object(content) or {"message": str(content)}
    code = error.get("code")
    has_type = dialect.anthropic_errors and isinstance(code, int)
    return _error(error_type(cast(int, code)) if has_type else _general_type(dialect), error)


def error_type(status: int) -> str:
    """Return Anthropic's error type for an HTTP status."""
    known = _ERROR_TYPES.get(status)
    return known or ("invalid_request_error" if status < 500 else "api_error")


def _general_type(dialect: Dialect) -> str:
    return "api_error" if dialect.anthropic_errors else "internal_error"


def _error(kind: str, error: Json) -> Json:
    return {"type": "error", "error": {"type": kind, "message": str(error.get("message", ""))}}


def _content(message: Json) -> list[Json]:
    """Return the content blocks for a chat message.

    An empty message gets one block with an empty text, because clients read the first block.
    """
    blocks: list[Json] = []
    reasoning, text = reasoning_of(message), message.get("content")
    if reasoning:
        thinking: Json = {"type": "thinking", "thinking": reasoning}
        blocks.append(thinking | {"signature": new_signature()})
    if text:
        blocks.append({"type": "text", "text": text})
    blocks += [_tool_use(as_object(call)) for call in as_list(message.get("tool_calls"))]
    return blocks or [{"type": "text", "text": ""}]


def _tool_use(call: Json) -> Json:
    function = as_object(call.get("function"))
    try:
        arguments: Any = json.loads(str(function.get("arguments")))
    except RecursionError:
        raise ValueError("the arguments of a tool call are nested too deep") from None
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a tool call are not a JSON object")
    name = function.get("name")
    return {"type": "tool_use", "id": call.get("id"), "name": name, "input": arguments}


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
