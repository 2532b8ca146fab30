"""A chat completion as vLLM's /v1/messages answers it, and errors in that format's shape.

Key order and left-out keys are those of vLLM's models, printed without what is not set.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, cast

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.formats.responses.dialect import Dialect

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""What is not here has no stop_reason. A stop string that was hit is an `end_turn` too."""

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
    """Of a thinking block: clients send it back, nobody checks it."""
    return secrets.token_hex(16)


def as_object(value: object) -> Json:
    """{} for what is none."""
    return cast(Json, value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """[] for what is none."""
    return cast(list[Any], value) if isinstance(value, list) else []


def reasoning_of(message: Json) -> object:
    """Of a message or a delta; older engines name it otherwise."""
    told = message.get("reasoning")
    return message.get("reasoning_content") if told is None else told


def usage_of(chat_usage: object) -> Json:
    """Cached tokens are part of vLLM's prompt_tokens, and no part of Anthropic's input_tokens."""
    told = as_object(chat_usage)
    details = as_object(told.get("prompt_tokens_details"))
    created, read = details.get("created_cache_tokens"), details.get("cached_tokens")
    fresh = _count(told.get("prompt_tokens")) - _count(created) - _count(read)
    usage: Json = {
        "input_tokens": max(0, fresh),
        "output_tokens": _count(told.get("completion_tokens")),
    }
    if created is not None:
        usage["cache_creation_input_tokens"] = created
    if read is not None:
        usage["cache_read_input_tokens"] = read
    return usage


def message_of(completion: Json) -> Json:
    """Raises ValueError where it holds no answer, or a call whose arguments are no JSON object:
    vLLM answers 500 then."""
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
    message["usage"] = usage_of(completion.get("usage"))
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if completion.get(name) is not None:
            message[name] = completion[name]
    return message


def has_readable_calls(message: Json) -> bool:
    """Whether the arguments of its calls are JSON objects, as those of a call that was cut off are
    not."""
    try:
        dumped({"content": _content(message)})
    except ValueError:
        return False
    return True


def dumped(value: Json) -> bytes:
    """As vLLM's web layer prints JSON; its numbers may be longer than orjson's. Raises ValueError
    for what JSON cannot say."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("the answer is nested too deep") from None
    return text.encode()


def refusal_of(status: int, body: Json) -> Json:
    """Errors of the web layer keep their shape on this route too: a malformed body, a key that is
    not known, a path that is not there."""
    error = as_object(body.get("error"))
    if not error or error.get("type") == "Bad Request":
        return body
    return _error(error_type(status), error)


def stream_error(body: Json, dialect: Dialect) -> Json:
    """`body` is vLLM's error body, of whatever layer."""
    told = body.get("error", body.get("detail"))
    error = as_object(told) or {"message": str(told)}
    code = error.get("code")
    is_told = dialect.anthropic_errors and isinstance(code, int)
    return _error(error_type(cast(int, code)) if is_told else _unnamed(dialect), error)


def error_type(status: int) -> str:
    known = _ERROR_TYPES.get(status)
    return known or ("invalid_request_error" if status < 500 else "api_error")


def _unnamed(dialect: Dialect) -> str:
    return "api_error" if dialect.anthropic_errors else "internal_error"


def _error(kind: str, error: Json) -> Json:
    return {"type": "error", "error": {"type": kind, "message": str(error.get("message", ""))}}


def _content(message: Json) -> list[Json]:
    """Never empty: clients read the first block."""
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
        raise ValueError("the arguments of a tool call are no JSON object")
    name = function.get("name")
    return {"type": "tool_use", "id": call.get("id"), "name": name, "input": arguments}


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
