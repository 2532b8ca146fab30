"""A script that drops its clients without closing them leaves no socket open."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Generator

import pytest

from fakevllm import EpisodeAccess, SwarmClient
from tests.proxy.sdk.small_server import JsonHandler, serving

CHAT = b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[]}'
STATUS = b'{"engine_status":"ENGINE.OFFLINE"}'


class ModelAndStatus(JsonHandler):
    def reply(self) -> bytes:
        return CHAT if self.command == "POST" else STATUS


@pytest.fixture
def url() -> Generator[str]:
    with warnings.catch_warnings(action="ignore"):
        gc.collect()  # what earlier tests have left open
    with serving(ModelAndStatus) as url:
        yield url


def test_a_dropped_openai_client_closes_its_sockets(url: str) -> None:
    client = EpisodeAccess(f"{url}/v1", "sk", "e").openai()
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    del client
    gc.collect()  # a socket left open is a warning, and so an error


def test_a_dropped_swarm_client_closes_its_sockets(url: str) -> None:
    client = SwarmClient(url, verbose=False)
    assert client.get_engine_status()[0] == "ENGINE.OFFLINE"
    del client
    gc.collect()
