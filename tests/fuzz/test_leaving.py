"""Who leaves a relayed route leaves no call behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fuzz.odd_upstream import OddUpstream
from tests.fuzz.rig import TIMEOUT_S, no_traceback, proxy_over

ASKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n"


async def left_behind(folder: Path, said: bytes, upstream: OddUpstream) -> None:
    """Says it to a proxy, waits for the call where there is one, and hangs up."""
    async with (
        asyncio.timeout(TIMEOUT_S),
        upstream.listening(),
        proxy_over(folder, upstream.url) as url,
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(said)
        await writer.drain()
        if upstream.is_silent:
            await upstream.was_asked.wait()
        writer.close()
        await writer.wait_closed()
        if upstream.is_silent:
            await upstream.was_left.wait()


async def test_a_relayed_call_ends_with_its_client(tmp_path: Path) -> None:
    upstream = OddUpstream()
    upstream.is_silent = True
    with no_traceback():
        await left_behind(tmp_path, ASKED + b'{"prompt":"hi"}', upstream)
    assert upstream.was_left.is_set()


@pytest.mark.parametrize("said", [ASKED, ASKED + b'{"prompt"', b"POST / HT", b"\xff\0\r\n\r\n"])
async def test_who_leaves_in_the_middle_of_a_request_leaves_no_traceback(
    tmp_path: Path, said: bytes
) -> None:
    with no_traceback():
        await left_behind(tmp_path, said, OddUpstream())
