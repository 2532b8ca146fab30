"""Claims of active clients: the limit of claims, repeated claims, pauses, and each engine
status."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.episodes.episode_registry import MAX_CLAIMED
from fakevllm_server.web.app import create_app
from fakevllm_server.web.server_state import ServerState

CLAIM = {"client_uuid": "me", "episode_type": "train", "discard_episode_timeout": 60}


@asynccontextmanager
async def run_server(folder: Path) -> AsyncGenerator[tuple[ServerState, httpx.AsyncClient]]:
    app = create_app(ServerConfig("fake", folder))
    state: ServerState = app.state.server
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield state, http
    await state.close()


async def test_a_claim_above_the_limit_is_refused_until_another_episode_ends(
    tmp_path: Path,
) -> None:
    """Clients match the first sentence of the message, and then repeat the claim."""
    async with run_server(tmp_path) as (state, http):
        for status in (EngineStatus.BOOTING, EngineStatus.ROLLING):
            state.engine.move(status, time.monotonic())
        episodes, now = state.episodes, time.monotonic()
        held = [episodes.claim("me", "train", 60.0, now) for _ in range(MAX_CLAIMED)]
        refused = (await http.post("/claim_episode", json=CLAIM)).json()
        assert not refused["success"]
        cause = refused["fail_cause"]
        assert cause.startswith("No available episodes to claim. Try again (maybe 1 minute) later.")
        assert cause.endswith("The limit of 2,000 claimed episodes is reached.")
        await state.intake.abort_episode(held[0].uuid, "me")
        assert (await http.post("/claim_episode", json=CLAIM)).json()["success"]


async def test_a_repeated_claim_gets_its_first_answer_while_the_engine_serves(
    tmp_path: Path,
) -> None:
    async with run_server(tmp_path) as (state, http):
        for status in (EngineStatus.BOOTING, EngineStatus.ROLLING):
            state.engine.move(status, time.monotonic())
        one, other = (CLAIM | {"idempotency_key": key} for key in ("one", "other"))
        first, _ = [(await http.post("/claim_episode", json=body)).json() for body in (one, other)]
        for status in (
            EngineStatus.ROLLING_POST,
            EngineStatus.WEIGHT_SYNCING,
            EngineStatus.BOOTING,
            EngineStatus.OFFLINE,
        ):
            state.engine.move(status, time.monotonic())
            again = (await http.post("/claim_episode", json=one)).json()
            if state.engine.is_serving:
                assert again == first
            else:
                assert again["fail_cause"].startswith(
                    f"Engine not ready. Current status: [{status}]"
                )
        assert state.episodes.num_claimed == 2


async def test_a_different_claim_with_the_same_idempotency_key_is_refused(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (state, http):
        for status in (EngineStatus.BOOTING, EngineStatus.ROLLING):
            state.engine.move(status, time.monotonic())
        one = CLAIM | {"idempotency_key": "one"}
        assert (await http.post("/claim_episode", json=one)).json()["success"]
        for change in ({"discard_episode_timeout": 5}, {"episode_type": "eval"}):
            assert (await http.post("/claim_episode", json=one | change)).status_code == 409
        assert state.episodes.num_claimed == 1


ADVICE = {
    EngineStatus.BOOTING: "Please wait until the engine is fully booted.",
    EngineStatus.ROLLING_POST: "Engine is in post-rolling phase.",
    EngineStatus.WEIGHT_SYNCING: "Engine is syncing weights.",
}
"""Messages of the protocol that clients match."""
END = {
    "client_uuid": "me",
    "task_id": "t",
    "workflow_output": {"reward": 1.0, "metadata": {"task_id": "t"}},
}


async def test_each_status_has_its_message_and_an_episode_can_end_during_a_weight_sync(
    tmp_path: Path,
) -> None:
    async with run_server(tmp_path) as (state, http):

        async def move(status: EngineStatus) -> None:
            state.engine.move(status, time.monotonic())
            if status in ADVICE:
                cause = (await http.post("/claim_episode", json=CLAIM)).json()["fail_cause"]
                message = f"Engine not ready. Current status: [{status}]. {ADVICE[status]}"
                assert cause == f"{message} Try again (maybe 1 minute) later."

        await move(EngineStatus.BOOTING)
        await move(EngineStatus.ROLLING)
        claimed = (await http.post("/claim_episode", json=CLAIM)).json()
        await move(EngineStatus.ROLLING_POST)
        await move(EngineStatus.WEIGHT_SYNCING)
        end = {**END, "episode_uuid": claimed["episode_uuid"]}
        ended = await http.post("/end_episode", json=end)
        assert (ended.status_code, ended.json()["success"]) == (200, True)


async def test_while_claims_are_paused_claimed_episodes_continue_and_new_claims_are_refused(
    tmp_path: Path,
) -> None:
    async with run_server(tmp_path) as (state, http):
        offline = (await http.post("/pause_claims")).json()
        assert not offline["success"] and "offline" in offline["failure_reason"]
        for status in (EngineStatus.BOOTING, EngineStatus.ROLLING):
            state.engine.move(status, time.monotonic())
        held = (await http.post("/claim_episode", json=CLAIM)).json()["episode_uuid"]
        assert (await http.post("/pause_claims")).json()["success"]
        assert (await http.get("/get_engine_status")).json()["claims_paused"]
        for kind in ("train", "eval"):
            claim = CLAIM | {"episode_type": kind}
            refused = (await http.post("/claim_episode", json=claim)).json()
            assert refused["fail_cause"].startswith("No available episodes to claim. ")
            assert "paused" in refused["fail_cause"]
        mine = {"client_uuid": "me", "episode_uuid": held}
        assert (await http.post("/can_continue_episode", json=mine)).json()["can_continue"]
        assert (await http.post("/resume_claims")).json()["success"]
        assert (await http.post("/claim_episode", json=CLAIM)).json()["success"]
        await http.post("/pause_claims")
        await state.stop_engine()  # the pause ends with the engine
        assert not (await http.get("/get_engine_status")).json()["claims_paused"]
