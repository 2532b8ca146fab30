"""The requests of the differential test, as they lie in `corpus/`: one file a format.

A file has `path`, `defaults` (fields of every body in it) and `requests`, each with a `name` and
any of

    body     fields beside the defaults; null is sent as null
    without  defaults to leave away
    raw      the whole body as text, instead
    method, path, headers
    key      false where no API key is shown; else the right one is, unless `headers` has another
    follows  name of a request of this file whose answer's id fills "{id}" in path and body
    text     "free" where what is sampled is not decided: the likeliest tokens are all but equally
             likely, or the siblings are not told of a parameter of the app's. Only the answer's
             shape is compared then
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

Json = dict[str, Any]

FOLDER = Path(__file__).parent / "corpus"
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

    def after(self, id: str) -> Request:
        """With the id of the answer it follows."""
        body = self.body.replace(PLACE.encode(), id.encode())
        return Request(
            self.name, self.method, self.path.replace(PLACE, id), self.headers, body, self.is_free
        )


@cache
def corpus() -> dict[str, Request]:
    """By name."""
    found = [request for file in sorted(FOLDER.glob("*.json")) for request in read(file)]
    by_name = {request.name: request for request in found}
    assert len(by_name) == len(found), "two requests of one name"
    return by_name


def read(file: Path) -> list[Request]:
    told: Json = json.loads(file.read_text())
    return [_request(file.stem, told, request) for request in cast(list[Json], told["requests"])]


def _request(format: str, file: Json, told: Json) -> Request:
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
