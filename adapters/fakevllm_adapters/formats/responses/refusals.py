"""The errors (400) with which vLLM refuses Responses requests and requests for stored responses.

An engine with its own Responses route refuses such requests itself. This module builds the same
errors for engines without such a route.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from fakevllm_adapters.formats.base import Json, NotTranslated
from fakevllm_adapters.protocol.errors import WireError, bad_request, error_body, schema_error

_NO_BACKGROUND = (
    "This vLLM engine does not support `store=True` and therefore does not support the background "
    "mode. To enable these features, set the environment variable "
    "`VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
)
_NO_SUCH_TOOL = "Tool choice 'function' not found in 'tools' parameter."


def unknown_response(response_id: object) -> WireError:
    """Return vLLM's 404 for a response id that does not exist, was deleted, or belongs to another
    API key."""
    message = f"Response with id '{response_id}' not found."
    return WireError(404, error_body(message, "invalid_request_error", 404, "response_id"))


def not_cancellable() -> WireError:
    """Return vLLM's 400 for the cancellation of a response that is complete."""
    message = "Cannot cancel a synchronous response."
    return WireError(400, error_body(message, "invalid_request_error", 400, "response_id"))


def malformed(problems: Sequence[Json]) -> NotTranslated:
    """Return the exception for a body in which fields are missing or have the wrong type.

    `problems` has the form of pydantic's `errors()`. The exception's message has only the names of
    the fields, because their values are private.
    """
    names = sorted({str(problem["loc"][0]) for problem in problems})
    return NotTranslated(f"the value of {', '.join(names)}", schema_error(problems))


def check_before_types(body: Json) -> None:
    """Run vLLM's first checks of a Responses body, which come before the checks of the fields'
    types. Raises NotTranslated if a check fails."""
    _check_tool_choice(body)
    salt: object = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        message = "Parameter 'cache_salt' must be a non-empty string if provided."
        raise _refused(message, "cache_salt")
    if body.get("prompt") is not None:
        raise _refused("prompt template is not supported", "prompt")
    if body.get("background") and not body.get("store", True):
        raise _refused("background can only be used when `store` is true", "background")


def check_after_types(background: bool, body: Json) -> None:
    """Run vLLM's last checks of a Responses body, which come after the checks of the fields' types.
    Raises NotTranslated if a check fails.

    `background` is the validated value of the body's field `background`.
    """
    if background:
        error = error_body(_NO_BACKGROUND, "invalid_request_error", 400, "background")
        raise NotTranslated("background", WireError(400, error))
    text: object = body.get("text")
    has_format = isinstance(text, dict) and cast(Json, text).get("format") is not None
    if body.get("structured_outputs") is not None and has_format:
        message = "Cannot specify both structured_outputs and text.format"
        raise _refused(message, "structured_outputs")


def _check_tool_choice(body: Json) -> None:
    choice: Any = body.get("tool_choice", "auto")
    tools: Any = body.get("tools")
    names_a_function = isinstance(choice, dict) and cast(Json, choice).get("type") == "function"
    if not tools and choice == "required":
        message = "Tool choice 'required' must be specified with 'tools' parameter."
        raise _refused(message, "tool_choice")
    if names_a_function and _name(cast(object, choice)) not in _function_names(tools):
        raise _refused(_NO_SUCH_TOOL, "tool_choice")


def _function_names(tools: object) -> set[object]:
    """Return the names of functions that the `tool_choice` of a request with these tools may
    name."""
    names: set[object] = set()
    for tool in cast(list[Any], tools) if isinstance(tools, list) else []:
        if not isinstance(tool, dict):
            continue
        entry = cast(Json, tool)
        if entry.get("type") != "namespace":
            names.add(_name(entry))
            continue
        inner: object = entry.get("tools")
        for function in cast(list[object], inner) if isinstance(inner, list) else []:
            name = _name(function)
            names |= {name, f"{entry.get('name')}__{name}"}
    return names - {None}


def _name(tool: object) -> str | None:
    name: object = cast(Json, tool).get("name") if isinstance(tool, dict) else None
    return name if isinstance(name, str) and name else None


def _refused(message: str, param: str) -> NotTranslated:
    error = bad_request(f"{message} (parameter={param})", param)
    return NotTranslated(f"the value of {param}", error)
