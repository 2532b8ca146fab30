"""Send one generated request over a connection of its own, with a timeout for the whole response.

A timeout for silence would not detect a hanging stream, because keep-alive events go on forever.
"""

from __future__ import annotations

import http.client
import time
from urllib.parse import urlsplit

from tests.differential.raw_http import RawResponse
from tests.openapi.cases import Case

TIMEOUT_S = 300.0
"""Timeout of a response in seconds. It is hundreds of times the duration of any generated
request."""


class ResponseTimeout(Exception):
    """The response was not complete within TIMEOUT_S."""


def send(url: str, case: Case, key: str) -> RawResponse:
    """Send the request to a server. `url` has no path. Raises ResponseTimeout."""
    deadline = time.monotonic() + TIMEOUT_S
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.putrequest(case.operation[0], case.target, skip_accept_encoding=True)
        connection.putheader("authorization", f"Bearer {key}")
        if case.content_type is not None:
            connection.putheader("content-type", case.content_type)
        if case.body or case.operation[0] == "POST":
            connection.putheader("content-length", str(len(case.body)))
        connection.endheaders(case.body or None)
        response = connection.getresponse()
        body, is_whole = _read(response, deadline)
        return RawResponse(response.status, response.getheaders(), body, is_whole)
    except TimeoutError:
        raise ResponseTimeout(str(case)) from None
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, deadline: float) -> tuple[bytes, bool]:
    chunks: list[bytes] = []
    try:
        while chunk := response.read1():
            chunks.append(chunk)
            if time.monotonic() > deadline:
                raise TimeoutError
    except http.client.IncompleteRead as cut:
        return b"".join([*chunks, cut.partial]), False
    return b"".join(chunks), True
