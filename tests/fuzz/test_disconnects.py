"""A client that disconnects from a relayed route leaves no call behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fuzz.in_process_stack import TIMEOUT_S, no_traceback, proxy_over
from tests.fuzz.odd_upstream import OddUpstream

REQUEST_HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n"


async def send_and_disconnect(folder: Path, sent: bytes, upstream: OddUpstream) -> None:
    """Send bytes to a proxy, wait for the upstream call if the upstream is silent, and
    disconnect."""
    async with (
        asyncio.timeout(TIMEOUT_S),
        upstream.listening(),
        proxy_over(folder, upstream.url) as url,
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(sent)
        await writer.drain()
        if upstream.is_silent:
            await upstream.has_request.wait()
        writer.close()
        await writer.wait_closed()
        if upstream.is_silent:
            await upstream.has_disconnect.wait()


async def test_a_relayed_call_ends_with_its_client(tmp_path: Path) -> None:
    upstream = OddUpstream()
    upstream.is_silent = True
    with no_traceback():
        await send_and_disconnect(tmp_path, REQUEST_HEAD + b'{"prompt":"hi"}', upstream)
    assert upstream.has_disconnect.is_set()


@pytest.mark.parametrize(
    "sent", [REQUEST_HEAD, REQUEST_HEAD + b'{"prompt"', b"POST / HT", b"\xff\0\r\n\r\n"]
)
async def test_a_disconnect_in_the_middle_of_a_request_causes_no_traceback(
    tmp_path: Path, sent: bytes
) -> None:
    with no_traceback():
        await send_and_disconnect(tmp_path, sent, OddUpstream())
