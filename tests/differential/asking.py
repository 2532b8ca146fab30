"""One request over a connection of its own, and all that came back."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.differential.corpus import Request

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Seen:
    status: int
    headers: list[tuple[str, str]]
    """As they came, names in the case they came in."""
    body: bytes
    is_whole: bool = True
    """False where the connection was closed in the middle of it."""

    @property
    def is_stream(self) -> bool:
        return self.header("content-type").startswith("text/event-stream")

    @property
    def id(self) -> str:
        """Of the answer, "" where it has none."""
        try:
            return str(json.loads(self.body).get("id", ""))
        except (ValueError, AttributeError):
            return ""

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")


def ask(url: str, request: Request) -> Seen:
    """At `url`, which has no path."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.putrequest(request.method, request.path, skip_accept_encoding=True)
        for name, value in request.headers.items():
            connection.putheader(name, value)
        if request.body or request.method == "POST":
            connection.putheader("content-length", str(len(request.body)))
        connection.endheaders(request.body or None)
        answer = connection.getresponse()
        try:
            return Seen(answer.status, answer.getheaders(), answer.read())
        except http.client.IncompleteRead as cut:
            return Seen(answer.status, answer.getheaders(), cut.partial, is_whole=False)
    finally:
        connection.close()
