"""Garbled responses of the upstream of a proxy or a server.

The client gets an answer or a valid HTTP error, each stream has an end, and no traceback is logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm_adapters.formats.sse import DONE
from fakevllm_adapters.protocol.swarm import SIBLING_HEADER
from tests.fuzz.bodies import CHAT_ANSWER, ERROR, TEXT_ANSWER, Json
from tests.fuzz.garble import garbled
from tests.fuzz.in_process_stack import (
    TIMEOUT_S,
    Reply,
    client_of_paused_loop,
    no_traceback,
    proxy_over,
    swarm_over,
)
from tests.fuzz.odd_upstream import OddUpstream, http
from tests.fuzz.test_answers import (
    CHUNKS,
    LAST_BYTES,
    REQUESTS,
    TEXT_CHUNKS,
    garbled_streams,
)

FEW = settings(max_examples=40)
HOOK = Path(__file__).parents[2] / "reward_hooks" / "exact_match.py"
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
}
JSON = b"Content-Type: application/json"
HEADS = [
    *([JSON] * 6),
    b"X-A: 1",
    b"Content-Type: text/event-stream",
    b"Content-Type: \xff\xfe",
    JSON + b"\r\nX-Odd: \xe2\x86\x92 \xff",
    JSON + b"\r\nContent-Encoding: gzip",
    JSON + b"\r\nRetry-After: soon",
]
STATUSES = [
    *([b"200"] * 3),
    *(b"201", b"204", b"302", b"304", b"400", b"404", b"429", b"500", b"503"),
    *(b"199", b"600", b"999", b"abc"),
]
MOVED = b"302 x\r\nLocation: /health"


@dataclass(frozen=True, slots=True)
class Fronts:
    """A proxy without hooks, a proxy with hooks, and a server, all over the same odd upstream."""

    loop: asyncio.Runner
    upstream: OddUpstream
    client: aiohttp.ClientSession
    urls: dict[str, str]

    def send(self, front: str, path: str, body: Json, answer: list[bytes], **headers: str) -> Reply:
        self.upstream.answer = answer
        with no_traceback():
            return self.loop.run(self._send(self.urls[front] + path, body, headers))

    async def _send(self, url: str, body: Json, headers: dict[str, str]) -> Reply:
        async with (
            asyncio.timeout(TIMEOUT_S),
            self.client.post(url, json=body, headers=headers) as answer,
        ):
            return Reply(answer.status, answer.headers, await answer.read())


@asynccontextmanager
async def _open_fronts(folder: Path) -> AsyncGenerator[tuple[OddUpstream, dict[str, str]]]:
    for name in ("proxy", "group", "server"):
        (folder / name).mkdir()
    async with (
        OddUpstream().listening() as upstream,
        proxy_over(folder / "proxy", upstream.url) as proxy,
        proxy_over(folder / "group", upstream.url, HOOK) as group,
        swarm_over(folder / "server", upstream.url) as (server, _),
    ):
        yield upstream, {"proxy": proxy, "group": group, "server": server}


@pytest.fixture(scope="module")
def fronts(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Generator[Fronts]:
    stack = AsyncExitStack()

    async def open_all() -> Fronts:
        folder = tmp_path_factory.mktemp("odd")
        upstream, urls = await stack.enter_async_context(_open_fronts(folder))
        client = await stack.enter_async_context(client_of_paused_loop())
        return Fronts(loop, upstream, client, urls)

    yield loop.run(open_all())
    loop.run(stack.aclose())


def framed(bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    """Return a strategy of HTTP responses with every status, most of them well framed."""
    whole = st.builds(http, bodies, st.sampled_from(HEADS), st.sampled_from(STATUSES))
    cut = st.builds(_cut, whole, st.integers(0, 4000))
    return st.lists(
        st.one_of(whole, whole, whole, cut, st.binary(max_size=60)), min_size=1, max_size=1
    )


def _cut(raw: bytes, at: int) -> bytes:
    return raw[: at % len(raw)]


def chunked(events: list[bytes]) -> list[bytes]:
    """Return the pieces of a streamed response with chunked framing."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked"
    pieces = [b"%x\r\n%s\r\n" % (len(event), event) for event in events if event]
    return [head + b"\r\n\r\n", *pieces, b"0\r\n\r\n"]


SIBLING = {SIBLING_HEADER: "g/0"}


@pytest.mark.parametrize("front", ["proxy", "group", "server"])
@pytest.mark.parametrize("name", PATHS)
def test_a_garbled_answer_is_an_answer_or_an_error(fronts: Fronts, name: str, front: str) -> None:
    @FEW
    @given(framed(garbled(CHAT_ANSWER, TEXT_ANSWER, ERROR)))
    def each(answer: list[bytes]) -> None:
        headers = SIBLING if front == "server" else {}
        reply = fronts.send(front, PATHS[name], REQUESTS[name], answer, **headers)
        assert 200 <= reply.status < 600
        if reply.status == 200 and name in ("responses", "messages"):
            assert isinstance(reply.json, dict)

    each()


@pytest.mark.parametrize("front", ["proxy", "group", "server"])
@pytest.mark.parametrize("name", LAST_BYTES)
@pytest.mark.parametrize("headers", [{}, SIBLING])
def test_a_garbled_stream_has_an_end(
    fronts: Fronts, name: str, front: str, headers: dict[str, str]
) -> None:
    if headers and front != "server":
        pytest.skip("only servers read this header")

    @FEW
    @given(garbled_streams(TEXT_CHUNKS if name == "completions" else CHUNKS))
    def each(events: list[bytes]) -> None:
        reply = fronts.send(
            front, PATHS[name], REQUESTS[name] | {"stream": True}, chunked(events), **headers
        )
        assert reply.status in (200, 400, 500, 503)
        is_passed_on = front == "server" and not headers and name in ("chat", "completions")
        if reply.status == 200 and not is_passed_on:
            has_end = (
                reply.body.endswith(LAST_BYTES[name])
                or b"error" in reply.body
                or DONE in reply.body
            )
            assert has_end, reply.body[-300:]

    each()


@pytest.mark.parametrize("front", ["proxy", "group", "server"])
def test_a_redirect_of_the_upstream_is_not_followed(fronts: Fronts, front: str) -> None:
    reply = fronts.send(front, PATHS["chat"], REQUESTS["chat"], [http(b"", JSON, MOVED)])
    assert reply.status == 503 and "error" in reply.json


@pytest.mark.parametrize("front", ["proxy", "group", "server"])
def test_an_error_nested_too_deeply_to_be_serialized_becomes_an_internal_error(
    fronts: Fronts, front: str
) -> None:
    deep = orjson.dumps(ERROR).replace(b'"m"', b"[" * 600 + b"]" * 600)
    reply = fronts.send(front, PATHS["messages"], REQUESTS["messages"], [http(deep, JSON, b"500")])
    assert reply.status == 500 and reply.json["error"]["message"] == "Internal server error"
