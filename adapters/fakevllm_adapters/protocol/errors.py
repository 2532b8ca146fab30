"""Error responses with the same wording and form as vLLM's.

vLLM spells the field `type` in two ways. vLLM's web framework writes the HTTP phrase ("Bad
Request"), and vLLM's serving classes write a class name ("BadRequestError"). Clients match on both
spellings, so both spellings are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from fakevllm_adapters.protocol.outage_reasons import OutageReason

Json = dict[str, Any]


@dataclass
class WireError(Exception):
    """Error that carries the HTTP status and the JSON body of the response for the client."""

    status: int
    body: Json
    retry_after_s: int | None = None
    """Value of the `Retry-After` header, in seconds; None sends no header."""
    reason: OutageReason | None = None
    """Machine-readable reason of an outage; None for every other error."""

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"

    @property
    def message(self) -> str:
        error: Any = self.body.get("error", self.body.get("detail"))
        message: object = cast(Json, error).get("message") if isinstance(error, dict) else None
        return str(cast(object, error) if message is None else message)


def error_body(message: str, kind: str, code: int, param: str | None = None) -> Json:
    """Return an error body in vLLM's form. `kind` becomes the body's field `type`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(message: str, param: str | None = None, value: object = None) -> WireError:
    """Build a 400 error for a value that the request schema allows but the engine refuses.

    If `param` and `value` are set, the message ends with vLLM's `(parameter=…, value=…)`.
    """
    if param is not None and value is not None:
        message = f"{message} (parameter={param}, value={value!r})"
    return WireError(400, error_body(message, "BadRequestError", 400, param))


def not_supported(field: str) -> WireError:
    """Build a 400 error that names a request field which the engine cannot honour.

    The request is refused, because it would have another meaning without the field.
    """
    return bad_request(f"`{field}` is not supported by this engine. (parameter={field})", field)


def not_served(reason: str) -> WireError:
    """Build a 400 error for a request that cannot be served in its API format.

    The request has no exact translation to chat completions, and the engine has no route for the
    request's format.
    """
    return bad_request(f"This engine cannot answer this request in this format: {reason}.")


def unknown_model(name: str, served: str) -> WireError:
    """Build a 404 for a request whose model `name` is not among the `served` model names."""
    message = f"The model `{name}` does not exist. Valid aliases: {served}."
    return WireError(404, error_body(message, "NotFoundError", 404, "model"))


def unavailable(
    message: str, reason: OutageReason | None = None, retry_after_s: int = 2
) -> WireError:
    """Build a 503 with the header `Retry-After`.

    Keep `retry_after_s` small: SDKs sleep for exactly this time before they retry. `reason` is the
    machine-readable reason, or None if programs need no reason for this error.
    """
    body = error_body(message, "Service Unavailable", 503)
    return WireError(503, body, retry_after_s, reason)


def internal_error() -> WireError:
    """Build vLLM's 500 for an internal error. It has no details."""
    return WireError(500, error_body("Internal server error", "InternalServerError", 500))


def error_of_failure(failure: Exception) -> WireError:
    """Build the response to a request whose handling failed unexpectedly. After a MemoryError, the
    response is a 503, because a later try may succeed. After any other error, the response is
    vLLM's 500."""
    if isinstance(failure, MemoryError):
        return unavailable("There is not enough memory for this request. Try again shortly.")
    return internal_error()


def unauthorized() -> WireError:
    """Build vLLM's 401 for a missing or wrong API key."""
    return WireError(401, {"error": "Unauthorized"})


def schema_error(problems: Sequence[Json], place: str = "body") -> WireError:
    """Build vLLM's 400 from the list of problems that pydantic's `errors()` returns.

    `place` is the part of the request that has the problems: `body` or `query`.

    >>> problem = {"type": "missing", "loc": ("messages",), "msg": "Field required", "input": {}}
    >>> schema_error([problem]).status
    400
    """
    lines = [f"  {_as_vllm_prints(problem, place)}" for problem in problems]
    count = len(lines)
    message = f"{count} validation error{'s' if count != 1 else ''}:\n" + "\n".join(lines)
    param = _as_vllm_prints(problems[0], place)["loc"] if problems else None
    return WireError(400, error_body(message, "Bad Request", 400, param))


def bad_json(position: int, reason: str) -> WireError:
    """Build vLLM's 400 for a body that is not JSON. `position` is the offset of the mistake in the
    body."""
    problem: Json = {
        "type": "json_invalid",
        "loc": (position,),
        "msg": "JSON decode error",
        "input": {},
    }
    return schema_error([problem | {"ctx": {"error": reason}}])


def bad_content_type() -> WireError:
    """Build vLLM's 400 for a content type other than JSON."""
    message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    return WireError(400, error_body(message, "Bad Request", 400))


def _as_vllm_prints(problem: Json, place: str) -> Json:
    loc = place + "".join(f".{part}" for part in problem["loc"])
    printed: Json = {"type": problem["type"], "loc": loc, "msg": problem["msg"]}
    printed["input"] = _summary(problem.get("input"))
    if "ctx" in problem:
        printed["ctx"] = {key: str(value) for key, value in problem["ctx"].items()}
    return printed


def _summary(value: object) -> object:
    """Return a short form of an invalid value, for an error message.

    For a container, return only its size. For a long string, return only its beginning. A request
    must not cause a large error response.
    """
    if isinstance(value, dict):
        return f"<dict of {len(value)} items>"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return f"<{type(value).__name__} of {len(value)} items>"  # pyright: ignore[reportUnknownArgumentType,reportUnknownMemberType]
    if isinstance(value, str) and len(value) > 200:
        return value[:200] + "..."
    return value
