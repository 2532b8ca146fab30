"""The requests of the differential test, as they lie in `corpus/`: one file a format. What lies in
`corpus/reasoning/` is asked of a model that thinks (thinking.py), the rest of one that does not.

A file has `path`, `defaults` (fields of every body in it) and `requests`, each with a `name` and
any of

    body     fields beside the defaults; null is sent as null
    without  defaults to leave away
    raw      the whole body as text, instead
    method, path, headers
    key      false where no API key is shown; else the right one is, unless `headers` has another
    follows  name of a request of this file whose answer's id fills "{id}" in path and body
    text     "free" where what is sampled is not decided: the likeliest tokens are all but equally
             likely, the siblings are not told of a parameter of the app's, or what is told of the
             tokens (offsets, logprobs of marks) depends on how vLLM joins them in a stream. Only
             the answer's shape is compared then
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

Json = dict[str, Any]

FOLDER = Path(__file__).parent / "corpus"
THINKING = "reasoning"
PLACE = "{id}"
KEY = "sk-differential"
"""In `headers`, {key} stands for it."""


@dataclass(frozen=True, slots=True)
class Request:
    name: str
    """`format: what is special about it`"""
    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    is_free: bool = False
    follows: str | None = None
    thinks: bool = False
    """The model that is asked."""

    def after(self, id: str) -> Request:
        """With the id of the answer it follows."""
        body = self.body.replace(PLACE.encode(), id.encode())
        return replace(self, path=self.path.replace(PLACE, id), body=body, follows=None)


@cache
def corpus() -> dict[str, Request]:
    """By name."""
    found = [request for file in sorted(FOLDER.rglob("*.json")) for request in read(file)]
    by_name = {request.name: request for request in found}
    assert len(by_name) == len(found), "two requests of one name"
    return by_name


def read(file: Path) -> list[Request]:
    thinks = file.parent.name == THINKING
    format = f"{THINKING} {file.stem}" if thinks else file.stem
    told: Json = json.loads(file.read_text())
    asked: list[Json] = told["requests"]
    return [_request(format, told, request, thinks=thinks) for request in asked]


def _request(format: str, file: Json, told: Json, *, thinks: bool) -> Request:
    method: str = told.get("method", "POST" if "defaults" in file else "GET")
    body = _body(file, told) if method == "POST" else told.get("raw", "").encode()
    headers = {"content-type": "application/json"} if body else {}
    if told.get("key", True):
        headers["authorization"] = "Bearer {key}"
    headers |= told.get("headers", {})
    return Request(
        f"{format}: {told['name']}",
        method,
        told.get("path", file.get("path", "/")),
        {name: _filled(value) for name, value in headers.items() if value is not None},
        body,
        told.get("text") == "free",
        f"{format}: {told['follows']}" if "follows" in told else None,
        thinks,
    )


def _filled(value: str) -> str:
    return value.replace("{key}", KEY)


def _body(file: Json, told: Json) -> bytes:
    if "raw" in told:
        return cast(str, told["raw"]).encode("utf-8", "surrogateescape")
    without: list[str] = told.get("without", [])
    kept = {key: value for key, value in file.get("defaults", {}).items() if key not in without}
    body = kept | told.get("body", {})
    return json.dumps(body, ensure_ascii=False).encode() if body or "body" in told else b""
