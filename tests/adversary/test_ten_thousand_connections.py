"""Ten thousand connections to a real proxy and to a real server, from a client without a key."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm_runtime.http_protocol import MIN_AGE_S
from fakevllm_runtime.open_files import raise_file_limit
from tests.e2e.processes import Process, Processes, wait_until

NUM_CONNECTIONS = 10_000
MIN_FILES = 12_000
"""Open files that this test needs."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        resource.getrlimit(resource.RLIMIT_NOFILE)[1] < MIN_FILES,
        reason=f"the hard limit on open files is below {MIN_FILES}",
    ),
]

SLACK_S = 5.0
"""Seconds by which the first answer may be later on a busy machine."""
KEY = "sk-app"
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "[[say hi]]"}]}
IDLE = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Half: "


@dataclass(frozen=True, slots=True)
class Stack:
    """A proxy and a server that accept only KEY."""

    proxy: Process
    server: Process


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("connections")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.MonkeyPatch.context() as environment, Processes(folder) as started:
        environment.setenv("FAKEVLLM_SWARM_KEY", KEY)
        server = started.server("--backend", "fake", "--key-file", str(keys))
        proxy = started.proxy(server, "--key-file", str(keys))
        raise_file_limit()
        yield Stack(proxy, server)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def connections(process: Process, sent: bytes) -> Generator[None]:
    """Open NUM_CONNECTIONS connections, and send the same bytes on each."""
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_CONNECTIONS):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", process.port), 30))
            if sent:
                with contextlib.suppress(ConnectionError):
                    one.send(sent)
        yield


def num_files(process: Process) -> int:
    return sum(1 for _ in Path(f"/proc/{process.pid}/fd").iterdir())


@pytest.mark.parametrize("target", ["proxy", "server"])
@pytest.mark.parametrize("sent", [b"", HALF, IDLE], ids=["silent", "half a head", "idle"])
def test_an_app_gets_its_answer_beside_ten_thousand_connections(
    stack: Stack, target: str, sent: bytes
) -> None:
    process: Process = getattr(stack, target)
    before = num_files(process)
    bearer = {"Authorization": f"Bearer {KEY}"}

    def ask() -> httpx.Response:
        url = f"{process.url}/v1/chat/completions"
        return httpx.post(url, json=CHAT, headers=bearer, timeout=60)

    with connections(process, sent):
        # Connections without a request are closed for others only when they are MIN_AGE_S old.
        wait_until(lambda: ask().status_code != 503, MIN_AGE_S + SLACK_S, "a connection")
        assert [ask().status_code for _ in range(3)] == [200] * 3
        assert httpx.get(f"{process.url}/health", timeout=60).status_code == 200
    wait_until(lambda: num_files(process) < before + 50, 60, lambda: f"{num_files(process)} files")
    assert process.returncode is None and "Traceback" not in process.log
