"""Whoever is cancelled while it asks for an episode keeps none."""

from __future__ import annotations

import asyncio
import threading

import orjson

from fakevllm import AsyncSwarmClient
from tests.proxy.sdk.small_server import Answering, serving

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


async def paths_asked(claim: bytes, *, is_held: bool) -> list[str]:
    """What a client asks that is cancelled as the server has its claim, or as it waits for its next
    try."""
    asked: list[str] = []
    came, may_answer = threading.Event(), threading.Event()

    class Server(Answering):
        def told(self) -> bytes:
            asked.append(self.path)
            if self.path != "/claim_episode":
                return b'{"success": true}'
            came.set()
            assert may_answer.wait(TIMEOUT_S)
            return claim

    if not is_held:
        may_answer.set()
    with serving(Server) as url:
        async with AsyncSwarmClient(url, verbose=False) as client:
            begun = asyncio.create_task(client.begin_episode())
            assert await asyncio.to_thread(came.wait, TIMEOUT_S)
            begun.cancel()
            await asyncio.sleep(0)  # it hears of it
            may_answer.set()
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.wait([begun])
            assert begun.cancelled()
    return asked


async def test_a_claim_that_is_granted_meanwhile_is_given_up() -> None:
    assert await paths_asked(CLAIMED, is_held=True) == ["/claim_episode", "/abort_episode"]


async def test_a_claim_that_is_refused_is_not_asked_for_again() -> None:
    assert await paths_asked(REFUSED, is_held=True) == ["/claim_episode"]


async def test_who_waits_for_the_next_try_waits_no_more() -> None:
    assert await paths_asked(REFUSED, is_held=False) == ["/claim_episode"]
