"""A script that just lets go of its clients leaves no socket behind."""

from __future__ import annotations

import gc
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from fakevllm import EpisodeAccess, SwarmClient

CHAT = b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[]}'
STATUS = b'{"engine_status":"ENGINE.OFFLINE"}'


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = CHAT if self.command == "POST" else STATUS
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Generator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_client_of_an_episode_closes_its_sockets_when_it_is_let_go(url: str) -> None:
    client = EpisodeAccess(f"{url}/v1", "sk", "e").openai()
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    del client
    gc.collect()  # a socket left open is a warning, and so an error


def test_a_client_of_a_server_closes_its_sockets_when_it_is_let_go(url: str) -> None:
    client = SwarmClient(url, verbose=False)
    assert client.get_engine_status()[0] == "ENGINE.OFFLINE"
    del client
    gc.collect()
