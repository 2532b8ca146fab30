"""The status of the proxy, fetched from servers that hang or send something else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress

import pytest

from fakevllm.console.sources import proxy_status
from fakevllm.console.sources.proxy_status import ProxyStatus, ProxyView
from fakevllm.console.sources.shared_reply import MAX_AGE_S, MAX_OLD_AGE_S
from fakevllm.errors import ConfigError
from fakevllm.runtime.admin_client import fetch_json

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
TROUBLE = b"HTTP/1.1 500 No\r\nContent-Length: 9\r\n\r\n{}"
FOREIGN = HEAD + b"Content-Length: 2\r\n\r\n{}"
NO_HTTP = b"SSH-2.0-OpenSSH_9.2\r\n"
DEEP = HEAD + b"\r\n" + b"[" * 100_000
HANG = b""
"""Reply of a server that keeps the connection open and sends nothing."""


@contextmanager
def open_server(*replies: bytes) -> Generator[tuple[str, list[socket.socket]]]:
    """Run a server that sends these bytes, one reply for each connection. Yield its URL and the
    list of its connections, which are closed at the end."""
    kept: list[socket.socket] = []

    def serve(listener: socket.socket, left: Iterator[bytes]) -> None:
        for reply in left:
            connection, _ = listener.accept()
            kept.append(connection)
            if reply != HANG:
                connection.recv(65536)
                with suppress(OSError):  # the client may have closed the connection
                    connection.sendall(reply)
                    connection.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener, iter(replies)), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", kept
        finally:
            for connection in kept:
                with suppress(OSError):  # the other side may have closed it
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(NO_HTTP, id="no HTTP"),
        pytest.param(HEAD + b"Content-Length: 100\r\n\r\n{", id="broken off"),
        pytest.param(DEEP, id="deep"),
        pytest.param(HEAD + b"\r\n[]", id="list"),
        pytest.param(HEAD + b'\r\n{"engine": 1, "counts": 1e999}', id="number"),
        pytest.param(TROUBLE, id="error that is broken off"),
    ],
)
def test_a_server_that_is_no_proxy_is_one_problem(reply: bytes) -> None:
    with open_server(reply) as (url, _):
        view = ProxyStatus(url, None).view()
    assert not view.is_reached
    assert len(view.problems) == 1 and url in view.problems[0].text


@pytest.mark.parametrize("reply", [NO_HTTP, DEEP, TROUBLE], ids=["no HTTP", "deep", "error"])
def test_a_command_says_that_no_proxy_answers_with_a_broken_reply(reply: bytes) -> None:
    with open_server(reply) as (url, _), pytest.raises(ConfigError, match="set --url"):
        fetch_json(url, "/fakevllm/stats", None)


def test_other_pages_show_the_old_status_while_a_proxy_hangs() -> None:
    now = [0.0]
    with open_server(FOREIGN, HANG) as (url, connections):
        status = ProxyStatus(url, None, lambda: now[0])
        first = status.view()
        now[0] += MAX_AGE_S + 1.0
        hanging = threading.Thread(target=status.view, daemon=True)
        hanging.start()
        while len(connections) < 2:
            assert hanging.is_alive()
        began = time.monotonic()
        assert status.view() is first
        assert time.monotonic() - began < 1.0
    hanging.join(10.0)
    assert not hanging.is_alive()


def test_a_status_of_long_ago_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_status, "TIMEOUT_S", 0.2)
    now = [0.0]
    with open_server(FOREIGN, HANG) as (url, _):
        status = ProxyStatus(url, None, lambda: now[0])
        first = status.view()
        now[0] += MAX_OLD_AGE_S + 1.0
        views: list[ProxyView] = []
        threads = [
            threading.Thread(target=lambda: views.append(status.view()), daemon=True)
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5.0)
    assert len(views) == 3 and first not in views
    assert all("No fakevllm proxy answers" in view.problems[0].text for view in views)
