"""What a request shows of its bearer, in each way that a client can show it."""

from __future__ import annotations

import base64

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.protocol.credentials import Shown, key_of, shown_by


def basic(raw: bytes) -> dict[bytes, bytes]:
    return {b"authorization": b"Basic " + base64.b64encode(raw)}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://ann:sk-1@host", Shown("sk-1", "ann")),
        ("http://:sk-1@host", Shown("sk-1", "")),
        ("http://ann:a%3Ab%40c@host", Shown("a:b@c", "ann")),
        ("http://ann@host", Shown(None)),
        ("http://host", Shown(None)),
    ],
)
def test_a_url_with_a_name_and_a_key_is_read_as_httpx_sends_it(url: str, shown: Shown) -> None:
    seen: list[Shown] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(shown_by(_lowered(request)))
        return httpx.Response(200)

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        http.get(url)
    assert seen == [shown]


def _lowered(request: httpx.Request) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in request.headers.raw}


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ({b"authorization": b"Bearer sk-1"}, Shown("sk-1")),
        ({b"x-api-key": b"sk-1"}, Shown("sk-1")),
        ({b"authorization": b"Bearer sk-1", b"x-api-key": b"sk-2"}, Shown("sk-1")),
        (basic(b"ann:sk-1") | {b"x-api-key": b"sk-2"}, Shown("sk-1", "ann")),
        ({b"authorization": b"basic  " + base64.b64encode(b"ann:sk-1")}, Shown("sk-1", "ann")),
        ({b"authorization": b"Basic !", b"x-api-key": b"sk-2"}, Shown("sk-2")),
        (basic(b"no colon"), Shown(None)),
        (basic(b"ann:\xff"), Shown(None)),
        (basic(b"ann:"), Shown(None)),
        ({b"authorization": b"Digest ann:sk-1"}, Shown(None)),
        ({}, Shown(None)),
    ],
)
def test_a_bearer_comes_before_anthropics_header_and_what_cannot_be_read_shows_nothing(
    headers: dict[bytes, bytes], shown: Shown
) -> None:
    assert shown_by(headers) == shown and key_of(headers) == shown.key


@given(st.binary(max_size=40), st.sampled_from([b"Basic ", b"basic", b"Bearer ", b""]))
def test_whatever_a_header_holds_it_is_read(value: bytes, scheme: bytes) -> None:
    shown = shown_by({b"authorization": scheme + value})
    assert shown.key is None or shown.key != ""
