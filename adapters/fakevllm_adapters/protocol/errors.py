"""vLLM's error bodies, written the way vLLM writes them.

    WireError            an HTTP answer that is an error: status and JSON body

vLLM uses two spellings of `type`: its web layer writes the HTTP phrase ("Bad Request"), its
serving classes
write a class name ("BadRequestError"). Clients match on both, so both are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

Json = dict[str, Any]


@dataclass
class WireError(Exception):
    """An error to be answered as is: `status` and a JSON-able `body`."""

    status: int
    body: Json
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"

    @property
    def message(self) -> str:
        error: Any = self.body.get("error", self.body.get("detail"))
        told: object = cast(Json, error).get("message") if isinstance(error, dict) else None
        return str(cast(object, error) if told is None else told)


def error_body(message: str, kind: str, code: int, param: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(message: str, param: str | None = None, value: object = None) -> WireError:
    """A semantic 400. With `value`, the message ends in vLLM's `(parameter=…, value=…)`."""
    if param is not None and value is not None:
        message = f"{message} (parameter={param}, value={value!r})"
    return WireError(400, error_body(message, "BadRequestError", 400, param))


def not_supported(field: str) -> WireError:
    """What an engine cannot honour is refused by name, never dropped."""
    return bad_request(f"`{field}` is not supported by this engine. (parameter={field})", field)


def not_served(reason: str) -> WireError:
    """For what neither we translate nor the engine takes in that format."""
    return bad_request(f"This engine cannot answer this request in this format: {reason}.")


def unknown_model(name: str, served: str) -> WireError:
    message = f"The model `{name}` does not exist. Valid aliases: {served}."
    return WireError(404, error_body(message, "NotFoundError", 404, "model"))


def unavailable(message: str, retry_after_s: int = 2) -> WireError:
    """503 with `Retry-After`, which retrying SDKs sleep for literally: keep it small."""
    return WireError(503, error_body(message, "Service Unavailable", 503), retry_after_s)


def internal_error() -> WireError:
    return WireError(500, error_body("Internal server error", "InternalServerError", 500))


def unauthorized() -> WireError:
    return WireError(401, {"error": "Unauthorized"})


def schema_error(problems: Sequence[Json]) -> WireError:
    """The 400 vLLM makes of pydantic's `errors()`; never a 422.

    >>> schema_error([{"type": "missing", "loc": ("messages",), "msg": "Field required", "input":
    {}}]).status
    400
    """
    lines = [f"  {_printed(problem)}" for problem in problems]
    count = len(lines)
    message = f"{count} validation error{'s' if count != 1 else ''}:\n" + "\n".join(lines)
    param = _printed(problems[0])["loc"] if problems else None
    return WireError(400, error_body(message, "Bad Request", 400, param))


def bad_json(position: int, reason: str) -> WireError:
    problem: Json = {
        "type": "json_invalid",
        "loc": (position,),
        "msg": "JSON decode error",
        "input": {},
    }
    return schema_error([problem | {"ctx": {"error": reason}}])


def bad_content_type() -> WireError:
    message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    return WireError(400, error_body(message, "Bad Request", 400))


def _printed(problem: Json) -> Json:
    loc = "body" + "".join(f".{part}" for part in problem["loc"])
    shown: Json = {"type": problem["type"], "loc": loc, "msg": problem["msg"]}
    shown["input"] = _summary(problem.get("input"))
    if "ctx" in problem:
        shown["ctx"] = {key: str(value) for key, value in problem["ctx"].items()}
    return shown


def _summary(value: object) -> object:
    """Containers are counted, not echoed: a small request must not buy a large error."""
    if isinstance(value, dict):
        return f"<dict of {len(value)} items>"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return f"<{type(value).__name__} of {len(value)} items>"  # pyright: ignore[reportUnknownArgumentType,reportUnknownMemberType]
    if isinstance(value, str) and len(value) > 200:
        return value[:200] + "..."
    return value
