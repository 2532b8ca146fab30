"""A task that is cancelled during its claim keeps no episode."""

from __future__ import annotations

import asyncio
import threading

import orjson

from fakevllm import AsyncSwarmClient
from tests.proxy.sdk.small_server import JsonHandler, serving

TIMEOUT_S = 20.0
CLAIMED = orjson.dumps(
    {
        "success": True,
        "client_uuid": "c",
        "episode_uuid": "granted",
        "openai_base_url": "http://here/e/granted/v1",
        "openai_api_key": "sk",
    }
)
REFUSED = b'{"success": false, "client_uuid": "c", "episode_uuid": "", "fail_cause": "none free"}'


async def requested_paths(claim: bytes, *, is_held: bool) -> list[str]:
    """Return the paths of all requests of a client that is cancelled during its claim.

    With `is_held`, the client is cancelled while the server processes the claim. Otherwise it is
    cancelled in the pause before the next attempt.
    """
    paths: list[str] = []
    received, may_answer = threading.Event(), threading.Event()

    class Server(JsonHandler):
        def reply(self) -> bytes:
            paths.append(self.path)
            if self.path != "/claim_episode":
                return b'{"success": true}'
            received.set()
            assert may_answer.wait(TIMEOUT_S)
            return claim

    if not is_held:
        may_answer.set()
    with serving(Server) as url:
        async with AsyncSwarmClient(url, verbose=False) as client:
            claiming = asyncio.create_task(client.begin_episode())
            assert await asyncio.to_thread(received.wait, TIMEOUT_S)
            claiming.cancel()
            await asyncio.sleep(0)  # lets the task see the cancellation
            may_answer.set()
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.wait([claiming])
            assert claiming.cancelled()
    return paths


async def test_a_claim_that_is_granted_after_the_cancellation_is_aborted() -> None:
    assert await requested_paths(CLAIMED, is_held=True) == ["/claim_episode", "/abort_episode"]


async def test_a_claim_that_is_refused_after_the_cancellation_is_not_retried() -> None:
    assert await requested_paths(REFUSED, is_held=True) == ["/claim_episode"]


async def test_a_cancellation_ends_the_pause_before_the_next_attempt() -> None:
    assert await requested_paths(REFUSED, is_held=False) == ["/claim_episode"]
