"""Drivers that are shared by many threads or tasks."""

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
from fakevllm.sdk import http_driver
from fakevllm.sdk.http_driver import (
    LOG_INTERVAL_S,
    MAX_IDLE_S,
    MIN_LOGGED_WAIT_S,
    AsyncHttpDriver,
    ConnectionPool,
    HttpDriver,
    WaitLog,
)
from fakevllm.sdk.protocol import Pause, ServerCall
from fakevllm.sdk.types import ClientClosed

NUM = 8
TIMEOUT_S = 20.0
STATUS = b'{"engine_status":"ENGINE.OFFLINE"}'


class Server(ThreadingHTTPServer):
    """Answers once NUM requests have arrived."""

    daemon_threads = True
    request_queue_size = NUM

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StatusHandler)
        self.all_there = threading.Barrier(NUM, timeout=TIMEOUT_S)
        self.connections: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class StatusHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def test_server(self) -> Server:
        return cast(Server, self.server)

    def setup(self) -> None:
        super().setup()
        self.test_server.connections.append(self.client_address)

    def do_GET(self) -> None:
        self.test_server.all_there.wait()
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
    """A gateway that fails for every other request."""

    num_requests = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Gateway.num_requests += 1
        has_reached = Gateway.num_requests % 2 == 0
        self.send_response(200 if has_reached else 502)
        self.end_headers()
        page = b"<html><head><title>502 Bad Gateway</title></head>\xff</html>"
        self.wfile.write(b'{"success":true}' if has_reached else page)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_an_end_is_retried_after_an_html_error_page() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{gateway.server_port}"
        with SwarmClient(url, verbose=False) as client:
            client.end_episode(Task(task_id="t"), "u1", WorkflowOutput(reward=1.0))
        gateway.shutdown()
    assert Gateway.num_requests == 2


class RequestCounter:
    """Counts the concurrent requests of each HTTP client."""

    def __init__(self) -> None:
        self._num_requests = Counter[int]()
        self.max_num = 0

    @contextmanager
    def requesting(self, client: object) -> Generator[None]:
        self._num_requests[id(client)] += 1
        self.max_num = max(self.max_num, self._num_requests[id(client)])
        try:
            yield
        finally:
            self._num_requests[id(client)] -= 1


def test_concurrent_threads_never_share_an_http_client(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = RequestCounter()

    class Watched(httpx.Client):
        def request(self, *args: Any, **named: Any) -> httpx.Response:
            with counter.requesting(self):
                return super().request(*args, **named)

    monkeypatch.setattr(httpx, "Client", Watched)
    with SwarmClient(server.url, verbose=False) as client, ThreadPoolExecutor(NUM) as threads:
        for _ in range(2):
            futures = [threads.submit(client.status) for _ in range(NUM)]
            assert {one.result().engine_status for one in futures} == {"ENGINE.OFFLINE"}
    assert counter.max_num == 1
    assert len(server.connections) == NUM, "connections are reused"


async def test_concurrent_tasks_never_share_an_http_client(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = RequestCounter()

    class Watched(httpx.AsyncClient):
        async def request(self, *args: Any, **named: Any) -> httpx.Response:
            with counter.requesting(self):
                return await super().request(*args, **named)

    monkeypatch.setattr(httpx, "AsyncClient", Watched)
    async with AsyncSwarmClient(server.url, verbose=False) as client:
        for _ in range(2):
            replies = await asyncio.gather(*(client.status() for _ in range(NUM)))
            assert {one.engine_status for one in replies} == {"ENGINE.OFFLINE"}
    assert counter.max_num == 1
    assert len(server.connections) == NUM, "connections are reused"


def test_a_closed_client_sends_no_request(server: Server) -> None:
    client = SwarmClient(server.url, verbose=False)
    client.close()
    with pytest.raises(ClientClosed, match="closed"):
        client.status()


def test_the_pool_returns_the_newest_client_and_drops_old_ones() -> None:
    pool = ConnectionPool[str]()
    assert pool.take() is None
    assert pool.put_back("a", 0.0) == [] and pool.put_back("b", 1.0) == []
    assert pool.take() == "b"
    assert pool.put_back("b", MAX_IDLE_S + 0.5) == ["a"]
    assert pool.take() == "b" and pool.take() is None


def test_a_closed_pool_keeps_no_client() -> None:
    pool = ConnectionPool[str]()
    pool.put_back("a", 0.0)
    assert pool.close() == ["a"] and pool.put_back("b", 0.0) == ["b"]
    with pytest.raises(ClientClosed):
        pool.take()


# --- log lines about waits


def waiting() -> ServerCall[None]:
    yield Pause(0.0, "none is free")


@pytest.fixture
def log_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """The log lines of clients that log every wait, however short the wait is."""
    monkeypatch.setattr(http_driver, "MIN_LOGGED_WAIT_S", 0.0)
    caplog.set_level(logging.INFO, "fakevllm.sdk")
    return caplog


def test_threads_that_wait_for_the_same_reason_log_it_once(
    log_lines: pytest.LogCaptureFixture,
) -> None:
    driver = HttpDriver("http://127.0.0.1:9")
    with ThreadPoolExecutor(64) as threads:
        list(threads.map(driver.run, [waiting() for _ in range(64)]))
    assert log_lines.messages == ["waiting: none is free"]


async def test_tasks_that_wait_for_the_same_reason_log_it_once(
    log_lines: pytest.LogCaptureFixture,
) -> None:
    driver = AsyncHttpDriver("http://127.0.0.1:9")
    await asyncio.gather(*(driver.run(waiting()) for _ in range(64)))
    assert log_lines.messages == ["waiting: none is free"]


def test_a_wait_is_logged_when_it_is_long_and_again_after_the_interval() -> None:
    wait_log = WaitLog()
    assert not wait_log.is_due("a", MIN_LOGGED_WAIT_S / 2, 0.0)
    assert wait_log.is_due("a", MIN_LOGGED_WAIT_S, 1.0)
    assert not wait_log.is_due("a", MIN_LOGGED_WAIT_S, LOG_INTERVAL_S)
    assert wait_log.is_due("b", MIN_LOGGED_WAIT_S, LOG_INTERVAL_S), (
        "another reason is logged at once"
    )
    assert wait_log.is_due("a", MIN_LOGGED_WAIT_S, 1.0 + LOG_INTERVAL_S)


def test_reasons_that_differ_only_in_numbers_are_the_same() -> None:
    wait_log = WaitLog()
    assert wait_log.is_due("32 are claimed", MIN_LOGGED_WAIT_S, 0.0)
    assert not wait_log.is_due("31 are claimed", MIN_LOGGED_WAIT_S, 1.0)


def test_only_one_of_several_concurrent_threads_logs_a_wait() -> None:
    wait_log, together = WaitLog(), threading.Barrier(NUM, timeout=TIMEOUT_S)

    def is_due(_: int) -> bool:
        together.wait()
        return wait_log.is_due("a", MIN_LOGGED_WAIT_S, 0.0)

    with ThreadPoolExecutor(NUM) as threads:
        assert sum(threads.map(is_due, range(NUM))) == 1


FORKING = """
import os
from fakevllm.sdk.http_driver import ConnectionPool
pool = ConnectionPool()
pool.put_back("a connection", 0.0)
child = os.fork()
taken = pool.take()
if child == 0:
    os._exit(taken is not None)
assert taken == "a connection"
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_process_uses_no_connection_of_its_parent() -> None:
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=TIMEOUT_S)
