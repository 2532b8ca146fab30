"""One generated request over a connection of its own, with a bound on the whole answer: events that
keep a stream alive never end, so that a bound on silence would not see a hang."""

from __future__ import annotations

import http.client
import time
from urllib.parse import urlsplit

from tests.differential.asking import Seen
from tests.openapi.cases import Case

BOUND_S = 300.0
"""Hundreds of times what any of the generated requests takes."""


class Hangs(Exception):
    """No whole answer in BOUND_S."""


def send(url: str, case: Case, key: str) -> Seen:
    """At `url`, which has no path. Raises Hangs."""
    deadline = time.monotonic() + BOUND_S
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=BOUND_S)
    try:
        connection.putrequest(case.operation[0], case.target, skip_accept_encoding=True)
        connection.putheader("authorization", f"Bearer {key}")
        if case.content_type is not None:
            connection.putheader("content-type", case.content_type)
        if case.body or case.operation[0] == "POST":
            connection.putheader("content-length", str(len(case.body)))
        connection.endheaders(case.body or None)
        answer = connection.getresponse()
        body, is_whole = _read(answer, deadline)
        return Seen(answer.status, answer.getheaders(), body, is_whole)
    except TimeoutError:
        raise Hangs(str(case)) from None
    finally:
        connection.close()


def _read(answer: http.client.HTTPResponse, deadline: float) -> tuple[bytes, bool]:
    chunks: list[bytes] = []
    try:
        while chunk := answer.read1():
            chunks.append(chunk)
            if time.monotonic() > deadline:
                raise TimeoutError
    except http.client.IncompleteRead as cut:
        return b"".join([*chunks, cut.partial]), False
    return b"".join(chunks), True
