"""Garbled requests to every route get an answer or a refusal in the route's own format, and never
cause a status 500 or a traceback."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import AsyncExitStack
from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm_adapters.protocol.swarm import SIBLING_HEADER
from tests.fuzz.bodies import APPS, ENGINES, SWARM
from tests.fuzz.garble import garbled
from tests.fuzz.in_process_stack import Reply, Stack, no_traceback, running

Headers = dict[str, str]
FEW = settings(max_examples=40)
KINDS: list[Headers] = [
    {"Content-Type": "application/json"},
    {"Content-Type": "application/json; charset=utf-16"},
    {"Content-Type": "text/plain"},
    {"Content-Type": "multipart/form-data"},
    {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": "é/☃"},
    {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    {"Content-Type": "application/json", "Content-Encoding": "deflate, br"},
    {"Content-Type": "application/json", "X-Request-Id": "é" * 300},
    {},
]
HEADERS = st.sampled_from([KINDS[0]] * 10 + KINDS)


@pytest.fixture(scope="module")
def stack(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Generator[Stack]:
    opened = AsyncExitStack()
    yield loop.run(opened.enter_async_context(running(tmp_path_factory.mktemp("stack"))))
    loop.run(opened.aclose())


def send_garbled(
    loop: asyncio.Runner, stack: Stack, url: str, valid: list[Any], **more: str
) -> list[Reply]:
    """Send garbled bodies, and return the replies.

    Raises AssertionError for an invalid status, an incomplete stream, or a traceback.
    """
    replies: list[Reply] = []

    @FEW
    @given(garbled(*valid), HEADERS)
    def each(raw: bytes, headers: Headers) -> None:
        with no_traceback():
            reply = loop.run(stack.send(url, raw, headers | more))
        assert reply.status == 200 or 400 <= reply.status < 500, (reply.status, reply.body[:500])
        if reply.status == 200 and "event-stream" in reply.headers.get("Content-Type", ""):
            assert reply.body.endswith(b"\n\n"), reply.body[-200:]
        replies.append(reply)

    each()
    return replies


def is_vllms(reply: Reply) -> bool:
    """Return whether a refusal has the form of vLLM's, in any format."""
    content = reply.json
    error: Any = content.get("error")
    is_error = isinstance(error, dict) and {"message", "type"} <= cast(dict[str, Any], error).keys()
    return is_error or (reply.status == 404 and content == {"detail": "Not Found"})


def refusals(replies: list[Reply]) -> list[Reply]:
    """Return the replies with another status than 200. Raises AssertionError if there is none."""
    refused = [reply for reply in replies if reply.status != 200]
    assert refused
    return refused


@pytest.mark.parametrize("path", ENGINES)
def test_an_engine_refuses_garbled_bodies_in_vllms_format(
    loop: asyncio.Runner, stack: Stack, path: str
) -> None:
    assert all(
        map(is_vllms, refusals(send_garbled(loop, stack, stack.engine + path, ENGINES[path])))
    )


@pytest.mark.parametrize("path", APPS)
def test_a_proxy_refuses_garbled_bodies_in_vllms_format(
    loop: asyncio.Runner, stack: Stack, path: str
) -> None:
    assert all(map(is_vllms, refusals(send_garbled(loop, stack, stack.proxy + path, APPS[path]))))


CALL_PATHS = [path for path in APPS if "resp_1" not in path and path != "/ping"]


@pytest.mark.parametrize("sibling", [None, "g/0", "g/9" + "9" * 50])
@pytest.mark.parametrize("path", CALL_PATHS)
def test_a_server_refuses_garbled_calls_in_vllms_format(
    loop: asyncio.Runner, stack: Stack, path: str, sibling: str | None
) -> None:
    more = {} if sibling is None else {SIBLING_HEADER: sibling}
    assert all(
        map(is_vllms, refusals(send_garbled(loop, stack, stack.server + path, APPS[path], **more)))
    )


@pytest.mark.parametrize("path", CALL_PATHS)
def test_a_server_refuses_garbled_calls_of_episodes_in_vllms_format(
    loop: asyncio.Runner, stack: Stack, path: str
) -> None:
    episode = stack.swarm.episodes.claim("c", "train", 1e9, 0.0)
    url = f"{stack.server}/e/{episode.uuid}{path}"
    key = {"Authorization": f"Bearer {episode.key}"}
    replies = send_garbled(loop, stack, url, APPS[path], **key)
    assert all(map(is_vllms, refusals(replies)))


@pytest.mark.parametrize("path", SWARM)
def test_the_swarm_protocol_refuses_garbled_bodies_with_a_reason(
    loop: asyncio.Runner, stack: Stack, path: str
) -> None:
    for reply in refusals(send_garbled(loop, stack, stack.server + path, SWARM[path])):
        assert reply.status in (400, 404, 409, 422) and reply.json["detail"]
        assert len(reply.body) < 10_000


NOISE = st.binary(max_size=30).map(lambda raw: raw.decode("latin-1"))
ODD_NAMES = st.sampled_from(
    [SIBLING_HEADER, "Authorization", "X-Api-Key", "X-Request-Id", "Content-Type", "Origin", "Host"]
)
ODD_WORDS = st.sampled_from(
    ["g/", "/0", "/", "g/-1", "g/²", "g/1e3", "g/" + "7" * 5000, "Bearer sk-ajet-x", "Bearer "]
)
ODD_TEXTS = (NOISE | ODD_WORDS).map(lambda text: "".join(filter(str.isprintable, text)))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/e/x/v1/messages", "/e/%00/tokenize"])
def test_odd_headers_are_refused_or_ignored(loop: asyncio.Runner, stack: Stack, path: str) -> None:
    @FEW
    @given(ODD_NAMES, ODD_TEXTS, st.sampled_from(["server", "proxy"]))
    def each(name: str, text: str, part: str) -> None:
        raw = orjson.dumps(APPS["/v1/chat/completions"][0])
        with no_traceback():
            reply = loop.run(stack.send(getattr(stack, part) + path, raw, {name: text}))
        assert reply.status == 200 or 400 <= reply.status < 500

    each()


async def _get(stack: Stack, url: str) -> Reply:
    async with stack.http.get(url) as answer:
        return Reply(answer.status, answer.headers, await answer.read())


ODD_NUMBERS = ["", "x", "NaN", "1e3", "-1", "9" * 30, "9" * 5000, "%00", "%FF", "1&after=x"]


@pytest.mark.parametrize("text", ODD_NUMBERS)
def test_an_odd_cursor_of_the_run_log_is_refused_or_read_as_a_number(
    loop: asyncio.Runner, stack: Stack, text: str
) -> None:
    with no_traceback():
        reply = loop.run(_get(stack, f"{stack.server}/get_run_log?after={text}"))
    assert reply.status == 200 or (reply.status == 422 and reply.json["detail"])


@pytest.mark.parametrize("part", ["server", "proxy"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/v1/responses/resp_1"])
@pytest.mark.parametrize("query", ["?x=%FF", "?starting_after=NaN&stream=true", "?" + "a" * 3000])
def test_an_odd_query_of_a_relayed_route_is_answered_or_refused(
    loop: asyncio.Runner, stack: Stack, part: str, path: str, query: str
) -> None:
    with no_traceback():
        reply = loop.run(_get(stack, getattr(stack, part) + path + query))
    assert reply.status in (200, 400, 404)
