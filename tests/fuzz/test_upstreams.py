"""Whatever is below a proxy or a server and whatever bytes it answers: the client gets an answer or
an error that HTTP can carry, a begun stream has an end, and no log a traceback."""

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
from tests.fuzz.odd_upstream import OddUpstream, http
from tests.fuzz.rig import TIMEOUT_S, Got, no_traceback, proxy_over, swarm_over
from tests.fuzz.test_answers import ASKED, CHUNKS, ENDS, TEXT_CHUNKS, events_of

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
class Asked:
    """Something that answers over an odd upstream."""

    loop: asyncio.Runner
    upstream: OddUpstream
    client: aiohttp.ClientSession
    urls: dict[str, str]

    def ask(self, door: str, path: str, body: Json, answer: list[bytes], **headers: str) -> Got:
        self.upstream.answer = answer
        with no_traceback():
            return self.loop.run(self._ask(self.urls[door] + path, body, headers))

    async def _ask(self, url: str, body: Json, headers: dict[str, str]) -> Got:
        async with (
            asyncio.timeout(TIMEOUT_S),
            self.client.post(url, json=body, headers=headers) as answer,
        ):
            return Got(answer.status, answer.headers, await answer.read())


@asynccontextmanager
async def _opened(folder: Path) -> AsyncGenerator[tuple[OddUpstream, dict[str, str]]]:
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
def asked(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Generator[Asked]:
    stack = AsyncExitStack()

    async def opened() -> Asked:
        folder = tmp_path_factory.mktemp("odd")
        upstream, urls = await stack.enter_async_context(_opened(folder))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        return Asked(loop, upstream, client, urls)

    yield loop.run(opened())
    loop.run(stack.aclose())


def framed(bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    """Whole answers of every status, well framed, and some that are not."""
    whole = st.builds(http, bodies, st.sampled_from(HEADS), st.sampled_from(STATUSES))
    cut = st.builds(_cut, whole, st.integers(0, 4000))
    return st.lists(
        st.one_of(whole, whole, whole, cut, st.binary(max_size=60)), min_size=1, max_size=1
    )


def _cut(raw: bytes, at: int) -> bytes:
    return raw[: at % len(raw)]


def chunked(events: list[bytes]) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked"
    pieces = [b"%x\r\n%s\r\n" % (len(event), event) for event in events if event]
    return [head + b"\r\n\r\n", *pieces, b"0\r\n\r\n"]


SIBLING = {SIBLING_HEADER: "g/0"}


@pytest.mark.parametrize("door", ["proxy", "group", "server"])
@pytest.mark.parametrize("name", PATHS)
def test_a_garbled_answer_is_an_answer_or_an_error(asked: Asked, name: str, door: str) -> None:
    @FEW
    @given(framed(garbled(CHAT_ANSWER, TEXT_ANSWER, ERROR)))
    def each(answer: list[bytes]) -> None:
        headers = SIBLING if door == "server" else {}
        got = asked.ask(door, PATHS[name], ASKED[name], answer, **headers)
        assert 200 <= got.status < 600
        if got.status == 200 and name in ("responses", "messages"):
            assert isinstance(got.json, dict)

    each()


@pytest.mark.parametrize("door", ["proxy", "group", "server"])
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("headers", [{}, SIBLING])
def test_a_garbled_stream_has_an_end(
    asked: Asked, name: str, door: str, headers: dict[str, str]
) -> None:
    if headers and door != "server":
        pytest.skip("only servers take them")

    @FEW
    @given(events_of(TEXT_CHUNKS if name == "completions" else CHUNKS))
    def each(events: list[bytes]) -> None:
        got = asked.ask(
            door, PATHS[name], ASKED[name] | {"stream": True}, chunked(events), **headers
        )
        assert got.status in (200, 400, 500, 503)
        is_passed_on = door == "server" and not headers and name in ("chat", "completions")
        if got.status == 200 and not is_passed_on:
            has_end = got.body.endswith(ENDS[name]) or b"error" in got.body or DONE in got.body
            assert has_end, got.body[-300:]

    each()


@pytest.mark.parametrize("door", ["proxy", "group", "server"])
def test_nobody_is_led_elsewhere_by_an_upstream(asked: Asked, door: str) -> None:
    got = asked.ask(door, PATHS["chat"], ASKED["chat"], [http(b"", JSON, MOVED)])
    assert got.status == 503 and "error" in got.json


@pytest.mark.parametrize("door", ["proxy", "group", "server"])
def test_an_error_too_deep_to_be_told_again_is_our_own(asked: Asked, door: str) -> None:
    deep = orjson.dumps(ERROR).replace(b'"m"', b"[" * 600 + b"]" * 600)
    got = asked.ask(door, PATHS["messages"], ASKED["messages"], [http(deep, JSON, b"500")])
    assert got.status == 500 and got.json["error"]["message"] == "Internal server error"
