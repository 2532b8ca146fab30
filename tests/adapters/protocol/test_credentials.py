"""Credentials in the headers of requests, in each form that a client can send."""

from __future__ import annotations

import base64

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.protocol.credentials import Credentials, api_key_of, credentials_in


def basic(raw: bytes) -> dict[bytes, bytes]:
    return {b"authorization": b"Basic " + base64.b64encode(raw)}


@pytest.mark.parametrize(
    ("url", "credentials"),
    [
        ("http://ann:sk-1@host", Credentials("sk-1", "ann")),
        ("http://:sk-1@host", Credentials("sk-1", "")),
        ("http://ann:a%3Ab%40c@host", Credentials("a:b@c", "ann")),
        ("http://ann@host", Credentials(None)),
        ("http://host", Credentials(None)),
    ],
)
def test_the_name_and_key_of_a_url_are_read_as_httpx_sends_them(
    url: str, credentials: Credentials
) -> None:
    received: list[Credentials] = []

    def answer(request: httpx.Request) -> httpx.Response:
        received.append(credentials_in(_lowered(request)))
        return httpx.Response(200)

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        http.get(url)
    assert received == [credentials]


def _lowered(request: httpx.Request) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in request.headers.raw}


@pytest.mark.parametrize(
    ("headers", "credentials"),
    [
        ({b"authorization": b"Bearer sk-1"}, Credentials("sk-1")),
        ({b"x-api-key": b"sk-1"}, Credentials("sk-1")),
        ({b"authorization": b"Bearer sk-1", b"x-api-key": b"sk-2"}, Credentials("sk-1")),
        (basic(b"ann:sk-1") | {b"x-api-key": b"sk-2"}, Credentials("sk-1", "ann")),
        (
            {b"authorization": b"basic  " + base64.b64encode(b"ann:sk-1")},
            Credentials("sk-1", "ann"),
        ),
        ({b"authorization": b"Basic !", b"x-api-key": b"sk-2"}, Credentials("sk-2")),
        (basic(b"no colon"), Credentials(None)),
        (basic(b"ann:\xff"), Credentials(None)),
        (basic(b"ann:"), Credentials(None)),
        ({b"authorization": b"Digest ann:sk-1"}, Credentials(None)),
        ({}, Credentials(None)),
    ],
)
def test_authorization_precedes_x_api_key_and_unreadable_credentials_count_as_none(
    headers: dict[bytes, bytes], credentials: Credentials
) -> None:
    assert credentials_in(headers) == credentials and api_key_of(headers) == credentials.key


@given(st.binary(max_size=40), st.sampled_from([b"Basic ", b"basic", b"Bearer ", b""]))
def test_any_header_is_parsed_without_an_error(value: bytes, scheme: bytes) -> None:
    credentials = credentials_in({b"authorization": scheme + value})
    assert credentials.key is None or credentials.key != ""
