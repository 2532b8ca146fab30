"""The requests of the differential test, from the folder `corpus/` with one file for each format.

Requests in `corpus/reasoning/` are sent to a reasoning model (reasoning_model.py), the others to a
model that does not reason.

A file has `path`, `defaults` (fields of every body in it) and `requests`. Each request has a `name`
and any of the following:

    body     fields in addition to the defaults; null is sent as null
    without  defaults to leave out
    raw      the whole body as text, instead of `body`
    method, path, headers
    key      false to send no API key; otherwise the right one is sent, unless `headers` has another
    follows  name of a request in this file; the id of its response replaces "{id}" in path and body
    text     "free" if the sampled text may differ; then only the shape of the response is compared

The text is free in three cases: the likeliest tokens are almost equally likely; the siblings do not
get a parameter of the app's; or data about tokens (offsets, logprobs of reasoning marks) depends on
how vLLM joins tokens in a stream.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

Json = dict[str, Any]

FOLDER = Path(__file__).parent / "corpus"
REASONING = "reasoning"
PLACE = "{id}"
KEY = "sk-differential"
"""The right API key, which replaces {key} in `headers`."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the corpus."""

    name: str
    """Name of the form "format: description"."""
    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    is_free: bool = False
    """Whether the sampled text may differ."""
    follows: str | None = None
    """Name of the request whose response's id is inserted."""
    is_reasoning: bool = False
    """Whether the request is sent to the reasoning model."""

    def after(self, id: str) -> Request:
        """Return the request with the id of the response that it follows."""
        body = self.body.replace(PLACE.encode(), id.encode())
        return replace(self, path=self.path.replace(PLACE, id), body=body, follows=None)


@cache
def corpus() -> dict[str, Request]:
    """Return all requests by name."""
    requests = [request for file in sorted(FOLDER.rglob("*.json")) for request in read(file)]
    by_name = {request.name: request for request in requests}
    assert len(by_name) == len(requests), "Two requests have the same name."
    return by_name


def read(file: Path) -> list[Request]:
    """Return the requests of one file."""
    is_reasoning = file.parent.name == REASONING
    format = f"{REASONING} {file.stem}" if is_reasoning else file.stem
    content: Json = json.loads(file.read_text())
    entries: list[Json] = content["requests"]
    return [_request(format, content, entry, is_reasoning=is_reasoning) for entry in entries]


def _request(format: str, file: Json, entry: Json, *, is_reasoning: bool) -> Request:
    method: str = entry.get("method", "POST" if "defaults" in file else "GET")
    body = _body(file, entry) if method == "POST" else entry.get("raw", "").encode()
    headers = {"content-type": "application/json"} if body else {}
    if entry.get("key", True):
        headers["authorization"] = "Bearer {key}"
    headers |= entry.get("headers", {})
    return Request(
        f"{format}: {entry['name']}",
        method,
        entry.get("path", file.get("path", "/")),
        {name: _filled(value) for name, value in headers.items() if value is not None},
        body,
        entry.get("text") == "free",
        f"{format}: {entry['follows']}" if "follows" in entry else None,
        is_reasoning,
    )


def _filled(value: str) -> str:
    return value.replace("{key}", KEY)


def _body(file: Json, entry: Json) -> bytes:
    if "raw" in entry:
        return cast(str, entry["raw"]).encode("utf-8", "surrogateescape")
    without: list[str] = entry.get("without", [])
    kept = {key: value for key, value in file.get("defaults", {}).items() if key not in without}
    body = kept | entry.get("body", {})
    return json.dumps(body, ensure_ascii=False).encode() if body or "body" in entry else b""
