"""The link that the console prints at its start is valid until ten minutes after the proxy is
ready."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fakevllm.console.access import first_link
from fakevllm.console.access.first_link import MAX_START_S, keep_first_link, proxy_is_starting
from fakevllm.console.access.login_link import LINK_LIFETIME_S, LoginLink
from fakevllm_runtime.engines import VLLM_BOOT_TIMEOUT_S

STEP_S = 60.0


class Boot:
    """A proxy that is ready at `ready_s`. Each look at its state takes STEP_S on the clock."""

    def __init__(self, ready_s: float) -> None:
        self.now = 0.0
        self._ready_s = ready_s

    def clock(self) -> float:
        return self.now

    def is_starting(self) -> bool:
        self.now += STEP_S
        return self.now < self._ready_s


async def test_the_ten_minutes_begin_when_the_proxy_is_ready() -> None:
    link, boot = LoginLink(), Boot(ready_s=VLLM_BOOT_TIMEOUT_S)
    code = link.issue(now=0.0)
    await keep_first_link(link, boot.is_starting, boot.clock, poll_every_s=0.0)
    assert boot.now == VLLM_BOOT_TIMEOUT_S > LINK_LIFETIME_S
    assert not LoginLink().redeem(code, boot.now)
    assert link.redeem(code, boot.now + LINK_LIFETIME_S - STEP_S)


async def test_a_link_is_not_kept_for_ever() -> None:
    link, boot = LoginLink(), Boot(ready_s=float("inf"))
    code = link.issue(now=0.0)
    await keep_first_link(link, boot.is_starting, boot.clock, poll_every_s=0.0)
    assert boot.now <= MAX_START_S + STEP_S
    assert not link.redeem(code, boot.now + LINK_LIFETIME_S + 1.0)


@contextmanager
def answering(status: int) -> Generator[str]:
    """Run an HTTP server that answers /health with this status, and any other path with 404."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("status", "is_starting"), [(200, False), (503, True), (404, False)])
def test_a_proxy_without_an_engine_is_starting(status: int, is_starting: bool) -> None:
    with answering(status) as url:
        assert proxy_is_starting(url) is is_starting
        assert proxy_is_starting(f"{url}/v1") is is_starting


def test_a_proxy_that_does_not_accept_connections_yet_is_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_link, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as opened_by_up:
        assert proxy_is_starting(f"http://127.0.0.1:{opened_by_up.getsockname()[1]}")


def test_a_console_without_a_proxy_does_not_wait_for_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert not proxy_is_starting(f"http://127.0.0.1:{port}")
    assert not proxy_is_starting("no URL")
