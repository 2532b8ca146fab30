"""Closing a client while one of its episodes runs."""

from __future__ import annotations

import json

import pytest

from fakevllm import SwarmClient, Task
from fakevllm.sdk.types import ClientClosed
from tests.proxy.sdk.small_server import JsonHandler, serving

CLAIM = {
    "success": True,
    "client_uuid": "c",
    "episode_uuid": "e",
    "openai_base_url": "http://127.0.0.1:1/v1",
    "openai_api_key": "sk",
    "fail_cause": "",
}
STATUS = {"engine_status": "ENGINE.ROLLING"}


class ClaimsAndStatus(JsonHandler):
    def reply(self) -> bytes:
        known = {"/claim_episode": CLAIM, "/get_engine_status": STATUS}
        return json.dumps(known.get(self.path, {"success": True})).encode()


def test_an_episode_that_fails_because_its_client_is_closed_says_so() -> None:
    with serving(ClaimsAndStatus) as url, SwarmClient(url, verbose=False) as client:
        with pytest.raises(ClientClosed) as raised, client.episode(Task(task_id="t")):
            client.close()
            raise ValueError("the episode was not found")
        assert isinstance(raised.value.__cause__, ValueError)


def test_an_episode_that_fails_while_its_client_is_open_raises_its_own_error() -> None:
    with (
        serving(ClaimsAndStatus) as url,
        SwarmClient(url, verbose=False) as client,
        pytest.raises(ValueError),
        client.episode(Task(task_id="t")),
    ):
        raise ValueError("the agent failed")
