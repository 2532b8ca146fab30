"""Talks carried out by many threads, or tasks, at once."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import httpx
import pytest

from fakevllm import AsyncSwarmClient, SwarmClient, Task, WorkflowOutput
from fakevllm.sdk import http_driver as waits
from fakevllm.sdk.connection_pool import KEPT_S, Spare
from fakevllm.sdk.http_driver import SHORT_S, TELL_EVERY_S, AsyncDriver, Driver, Waits
from fakevllm.sdk.protocol import Pause, Talk
from fakevllm.sdk.types import ClientClosed

NUM = 8
TIMEOUT_S = 20.0
STATUS = b'{"engine_status":"ENGINE.OFFLINE"}'


class Server(ThreadingHTTPServer):
    """Answers NUM requests at once, and none before there are as many."""

    daemon_threads = True
    request_queue_size = NUM

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.all_there = threading.Barrier(NUM, timeout=TIMEOUT_S)
        self.connections: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def ours(self) -> Server:
        return cast(Server, self.server)

    def setup(self) -> None:
        super().setup()
        self.ours.connections.append(self.client_address)

    def do_GET(self) -> None:
        self.ours.all_there.wait()
        self.send_response(200)
        self.send_header("Content-Length", str(len(STATUS)))
        self.end_headers()
        self.wfile.write(STATUS)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Generator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Gateway(BaseHTTPRequestHandler):
    """Before a server that it reaches each second time."""

    num_asked = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Gateway.num_asked += 1
        is_reached = Gateway.num_asked % 2 == 0
        self.send_response(200 if is_reached else 502)
        self.end_headers()
        page = b"<html><head><title>502 Bad Gateway</title></head>\xff</html>"
        self.wfile.write(b'{"success":true}' if is_reached else page)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_an_end_outlasts_a_gateway_that_answers_with_a_page() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{gateway.server_port}"
        with SwarmClient(url, verbose=False) as client:
            client.end_episode(Task(task_id="t"), "u1", WorkflowOutput(reward=1.0))
        gateway.shutdown()
    assert Gateway.num_asked == 2


class Alone:
    """Counts the requests that each HTTP client has in hand."""

    def __init__(self) -> None:
        self._in_hand = Counter[int]()
        self.most = 0

    @contextmanager
    def asking(self, client: object) -> Generator[None]:
        self._in_hand[id(client)] += 1
        self.most = max(self.most, self._in_hand[id(client)])
        try:
            yield
        finally:
            self._in_hand[id(client)] -= 1


def test_threads_that_ask_at_once_never_share_an_http_client(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Alone()

    class Watched(httpx.Client):
        def request(self, *args: Any, **named: Any) -> httpx.Response:
            with alone.asking(self):
                return super().request(*args, **named)

    monkeypatch.setattr(httpx, "Client", Watched)
    with SwarmClient(server.url, verbose=False) as client, ThreadPoolExecutor(NUM) as threads:
        for _ in range(2):
            asked = [threads.submit(client.status) for _ in range(NUM)]
            assert {one.result().engine_status for one in asked} == {"ENGINE.OFFLINE"}
    assert alone.most == 1
    assert len(server.connections) == NUM, "connections are used again"


async def test_tasks_that_ask_at_once_never_share_an_http_client(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Alone()

    class Watched(httpx.AsyncClient):
        async def request(self, *args: Any, **named: Any) -> httpx.Response:
            with alone.asking(self):
                return await super().request(*args, **named)

    monkeypatch.setattr(httpx, "AsyncClient", Watched)
    async with AsyncSwarmClient(server.url, verbose=False) as client:
        for _ in range(2):
            known = await asyncio.gather(*(client.status() for _ in range(NUM)))
            assert {one.engine_status for one in known} == {"ENGINE.OFFLINE"}
    assert alone.most == 1
    assert len(server.connections) == NUM, "connections are used again"


def test_a_client_that_is_closed_asks_nothing_more(server: Server) -> None:
    client = SwarmClient(server.url, verbose=False)
    client.close()
    with pytest.raises(ClientClosed, match="closed"):
        client.status()


def test_what_was_put_back_last_is_taken_first_and_what_nobody_takes_is_given_up() -> None:
    spare = Spare[str]()
    assert spare.take() is None
    assert spare.put_back("a", 0.0) == [] and spare.put_back("b", 1.0) == []
    assert spare.take() == "b"
    assert spare.put_back("b", KEPT_S + 0.5) == ["a"]
    assert spare.take() == "b" and spare.take() is None


def test_after_its_end_nothing_is_kept() -> None:
    spare = Spare[str]()
    spare.put_back("a", 0.0)
    assert spare.close() == ["a"] and spare.put_back("b", 0.0) == ["b"]
    with pytest.raises(ClientClosed):
        spare.take()


# --- what is said of waits


def waiting() -> Talk[None]:
    yield Pause(0.0, "none is free")


@pytest.fixture
def told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What clients say for whom no wait is too short."""
    monkeypatch.setattr(waits, "SHORT_S", 0.0)
    caplog.set_level(logging.INFO, "fakevllm.sdk")
    return caplog


def test_threads_that_wait_for_the_same_say_it_once(told: pytest.LogCaptureFixture) -> None:
    driver = Driver("http://127.0.0.1:9")
    with ThreadPoolExecutor(64) as threads:
        list(threads.map(driver.run, [waiting() for _ in range(64)]))
    assert told.messages == ["waiting: none is free"]


async def test_tasks_that_wait_for_the_same_say_it_once(told: pytest.LogCaptureFixture) -> None:
    driver = AsyncDriver("http://127.0.0.1:9")
    await asyncio.gather(*(driver.run(waiting()) for _ in range(64)))
    assert told.messages == ["waiting: none is free"]


def test_a_wait_is_told_once_it_is_long_and_again_after_a_while() -> None:
    waits = Waits()
    assert not waits.is_due("a", SHORT_S / 2, 0.0)
    assert waits.is_due("a", SHORT_S, 1.0)
    assert not waits.is_due("a", SHORT_S, TELL_EVERY_S)
    assert waits.is_due("b", SHORT_S, TELL_EVERY_S), "another wait is told at once"
    assert waits.is_due("a", SHORT_S, 1.0 + TELL_EVERY_S)


def test_the_same_wait_with_other_numbers_is_not_another() -> None:
    waits = Waits()
    assert waits.is_due("32 are claimed", SHORT_S, 0.0)
    assert not waits.is_due("31 are claimed", SHORT_S, 1.0)


def test_of_threads_that_come_at_the_same_time_one_tells_it() -> None:
    waits, together = Waits(), threading.Barrier(NUM, timeout=TIMEOUT_S)

    def is_due(_: int) -> bool:
        together.wait()
        return waits.is_due("a", SHORT_S, 0.0)

    with ThreadPoolExecutor(NUM) as threads:
        assert sum(threads.map(is_due, range(NUM))) == 1


FORKING = """
import os
from fakevllm.sdk.connection_pool import Spare
spare = Spare()
spare.put_back("a connection", 0.0)
child = os.fork()
taken = spare.take()
if child == 0:
    os._exit(taken is not None)
assert taken == "a connection"
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_process_that_is_forked_uses_no_connection_of_its_parent() -> None:
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=TIMEOUT_S)
