"""What active clients are told where no more of them are taken."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from fakevllm_adapters.swarm import EngineStatus
from fakevllm_server.app import create_app
from fakevllm_server.config import ServerConfig
from fakevllm_server.episodes import MAX_CLAIMED
from fakevllm_server.swarm import Swarm

CLAIM = {"client_uuid": "me", "episode_type": "train", "discard_episode_timeout": 60}


async def test_a_claim_beyond_the_bound_is_told_so_and_taken_once_another_has_ended(
    tmp_path: Path,
) -> None:
    """The first sentence is the protocol's: clients look for it, and ask again."""
    app = create_app(ServerConfig("fake", tmp_path))
    swarm: Swarm = app.state.swarm
    for status in (EngineStatus.BOOTING, EngineStatus.ROLLING):
        swarm.engine.move(status, time.monotonic())
    held = [swarm.episodes.claim("me", "train", 60.0, time.monotonic()) for _ in range(MAX_CLAIMED)]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        refused = (await http.post("/claim_episode", json=CLAIM)).json()
        assert not refused["success"]
        cause = refused["fail_cause"]
        assert cause.startswith("No available episodes to claim. Try again (maybe 1 minute) later.")
        assert cause.endswith("2,000 are claimed, and no more are at once.")
        await swarm.intake.abort_episode(held[0].uuid, "me")
        assert (await http.post("/claim_episode", json=CLAIM)).json()["success"]
    await swarm.close()
