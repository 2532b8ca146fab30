"""Send one HTTP request over a connection of its own, and return the raw response."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.differential.corpus import Request

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RawResponse:
    """A response as it came over the wire."""

    status: int
    headers: list[tuple[str, str]]
    """Names and values in the order and the letter case of the wire."""
    body: bytes
    is_whole: bool = True
    """False if the connection was closed in the middle of the body."""

    @property
    def is_stream(self) -> bool:
        return self.header("content-type").startswith("text/event-stream")

    @property
    def id(self) -> str:
        """Id in the body, "" if there is none."""
        try:
            return str(json.loads(self.body).get("id", ""))
        except (ValueError, AttributeError):
            return ""

    def header(self, name: str) -> str:
        """Return the first value of a header, "" if it is missing. `name` is in lower case."""
        return next((value for key, value in self.headers if key.lower() == name), "")


def send(url: str, request: Request) -> RawResponse:
    """Send the request to a server. `url` has no path. Raises OSError."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.putrequest(request.method, request.path, skip_accept_encoding=True)
        for name, value in request.headers.items():
            connection.putheader(name, value)
        if request.body or request.method == "POST":
            connection.putheader("content-length", str(len(request.body)))
        connection.endheaders(request.body or None)
        response = connection.getresponse()
        try:
            return RawResponse(response.status, response.getheaders(), response.read())
        except http.client.IncompleteRead as cut:
            return RawResponse(response.status, response.getheaders(), cut.partial, is_whole=False)
    finally:
        connection.close()
