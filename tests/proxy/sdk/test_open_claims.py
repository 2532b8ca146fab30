"""A script that just lets go of its clients leaves no socket behind."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

from fakevllm import EpisodeAccess, SwarmClient
from tests.proxy.sdk.small_server import Answering, serving

CHAT = b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[]}'
STATUS = b'{"engine_status":"ENGINE.OFFLINE"}'


class Both(Answering):
    def told(self) -> bytes:
        return CHAT if self.command == "POST" else STATUS


@pytest.fixture
def url() -> Generator[str]:
    with serving(Both) as url:
        yield url


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
