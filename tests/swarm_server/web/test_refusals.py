"""Refused requests: the reply names the invalid field in one line, and nothing changes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm_adapters.http.asgi import MAX_BODY_BYTES
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.app import create_app
from fakevllm_server.web.server_state import ServerState

Json = dict[str, Any]
CLAIM: Json = {"client_uuid": "me", "episode_type": "train", "discard_episode_timeout": 60}


@dataclass
class RunningServer:
    """The app of a server in memory, with an HTTP client."""

    state: ServerState
    http: httpx.AsyncClient

    async def claim(self, **changes: Any) -> str:
        reply = (await self.http.post("/claim_episode", json=CLAIM | changes)).json()
        assert reply["success"], reply
        return reply["episode_uuid"]

    async def refused(self, path: str, **body: Any) -> tuple[int, str]:
        """Post a request that is refused, and return its status and its detail."""
        answer = await self.http.post(path, **body)
        detail = answer.json()["detail"]
        assert isinstance(detail, str) and "\n" not in detail and len(detail) < 400
        return answer.status_code, detail

    def move(self, *states: EngineStatus) -> None:
        for state in states:
            self.state.engine.move(state, time.monotonic())


@contextlib.asynccontextmanager
async def rolling(folder: Path) -> AsyncGenerator[RunningServer]:
    app = create_app(ServerConfig("fake", folder))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        server = RunningServer(app.state.server, http)
        server.move(EngineStatus.BOOTING, EngineStatus.ROLLING)
        yield server
        await server.state.close()


def end_body(uuid: str, reward: Any = 1.0, **changes: Any) -> Json:
    output: Json = {"reward": reward, "metadata": {"task_id": "t"}}
    end = {"client_uuid": "me", "episode_uuid": uuid, "task_id": "t", "workflow_output": output}
    return end | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"discard_episode_timeout": -1}, "discard_episode_timeout: Input should be greater"),
        ({"discard_episode_timeout": 0}, "discard_episode_timeout: Input should be greater"),
        ({"discard_episode_timeout": 1e9}, "discard_episode_timeout: Input should be less"),
        ({"discard_episode_timeout": "soon"}, "discard_episode_timeout: Input should be a valid"),
        ({"discard_episode_timeout": None}, "discard_episode_timeout: Input should be a valid"),
        ({"client_uuid": ""}, "client_uuid: String should have at least 1"),
        ({"client_uuid": "x" * 10_240}, "client_uuid: String should have at most"),
        ({"client_uuid": 5}, "client_uuid: Input should be a valid string, got 5"),
        ({"episode_type": "x" * 10_240}, "episode_type: String should have at most"),
        ({"episode_type": "Train"}, "Unknown episode_type: Train"),
        ({"throttle_policy": 5}, "throttle_policy: Input should be a valid dictionary"),
        ({"throttle_policy": {"ratio": 0}}, "throttle_policy.ratio: Input should be greater"),
        ({"throttle_policy": {"ratio": -1}}, "throttle_policy.ratio: Input should be greater"),
        ({"throttle_policy": {"share": 0}}, "throttle_policy.share: Input should be greater"),
        ({"throttle_policy": {"share": 1e-320}}, "throttle_policy.share: Input should be greater"),
        ({"throttle_policy": {"share": 1.01}}, "throttle_policy.share: Input should be less"),
        ({"throttle_policy": {"mix": "x" * 10_240}}, "throttle_policy.mix: String should have"),
        (
            {"throttle_policy": {"current_task_id": "x" * 10_240}},
            "throttle_policy.current_task_id: String should have at most",
        ),
        (
            {"throttle_policy": {"expected_batch_size": 0}},
            "throttle_policy.expected_batch_size: Input should be greater",
        ),
    ],
)
async def test_an_invalid_claim_is_refused_and_takes_no_slot(
    tmp_path: Path, changes: Json, message: str
) -> None:
    async with rolling(tmp_path) as server:
        code, detail = await server.refused("/claim_episode", json=CLAIM | changes)
        assert code in (400, 422) and detail.startswith(message)
        assert server.state.episodes.num_claimed == 0


NOT_A_NUMBER = "workflow_output.reward: must be a number, not text"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[
            ({"reward": reward}, "workflow_output.reward must be one number")
            for reward in ([], [1.0])
        ],
        ({"reward": None}, "workflow_output.reward must be one number, got None"),
        ({"reward": {}}, "workflow_output.reward: Input should be a valid number, got {}"),
        *[({"reward": text}, NOT_A_NUMBER) for text in ("good", "1.5", "nan", "-inf")],
        ({"reward": 1e10}, "workflow_output.reward: Input should be less than or equal"),
        ({"reward": -1e308}, "workflow_output.reward: Input should be greater than or equal"),
        ({"task_id": ""}, "workflow_output.metadata['task_id'] must be there and equal"),
        ({"task_id": "other"}, "workflow_output.metadata['task_id'] must be there and equal"),
        ({"task_id": "x" * 10_240}, "task_id: String should have at most"),
        ({"task_id": 5}, "task_id: Input should be a valid string"),
        ({"workflow_output": {}}, "workflow_output.metadata['task_id'] must be there"),
        ({"workflow_output": "1"}, "workflow_output: Input should be a valid dictionary"),
        (
            {"workflow_output": {"reward": 1, "log_metrics": {"a": "x"}}},
            "workflow_output.log_metrics.a: Input should be a valid number",
        ),
        *[
            (
                {"workflow_output": {"reward": 1, "log_metrics": {"a": value}}},
                f"workflow_output.log_metrics.a: must be at most 1e+30 either way, got {value}",
            )
            for value in (1e308, -1e31, [1.0, 1e308])
        ],
        ({"client_uuid": "another"}, "Episode UUID is claimed by different client: me, but got"),
        ({"episode_uuid": "x" * 10_240}, f"Episode {'x' * 80} not found."),
        ({"episode_uuid": ""}, "Episode  not found."),
        ({"episode_uuid": "\0é\x1b[31m"}, "Episode \0é\x1b[31m not found."),
    ],
)
async def test_an_invalid_end_is_refused_and_leaves_the_episode_claimed(
    tmp_path: Path, changes: Json, message: str
) -> None:
    async with rolling(tmp_path) as server:
        uuid = await server.claim()
        code, detail = await server.refused("/end_episode", json=end_body(uuid, **changes))
        assert code in (400, 404, 422) and detail.startswith(message.replace("UUID", uuid))
        assert [one.uuid for one in server.state.episodes.claimed] == [uuid]
        assert server.state.pool.counts.num_episodes == 0
        assert (await server.http.post("/end_episode", json=end_body(uuid))).json()["success"]


DEEP = b'{"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NOT_FINITE = "JSON has no NaN and no Infinity: send a finite number."
NOT_AN_OBJECT = (
    "The body must be one JSON object, sent with the header content-type: application/json."
)


@pytest.mark.parametrize("path", ["/end_episode", "/end_group", "/claim_episode"])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"reward": NaN}', 422, NOT_FINITE),
        (b'{"reward": -Infinity}', 422, NOT_FINITE),
        (b'{"reward": 1e400}', 422, "number is infinity"),
        (b'{"reward', 422, "The body is not JSON: "),
        (b'{"client_uuid": "\xff"}', 422, "The body is not JSON: "),
        (b'{"client_uuid": "\\ud800"}', 422, "The body is not JSON: "),
        (DEEP, 422, "The body is not JSON: "),
        (b"[]", 422, NOT_AN_OBJECT),
        (b"", 422, NOT_AN_OBJECT),
        (b'"' + b"x" * MAX_BODY_BYTES + b'"', 413, "The request body is larger than"),
    ],
    ids=lambda value: repr(value)[:30],
)
async def test_an_unreadable_body_is_refused_with_the_reason(
    tmp_path: Path, path: str, body: bytes, status: int, message: str
) -> None:
    async with rolling(tmp_path) as server:
        headers = {"content-type": "application/json"}
        code, detail = await server.refused(path, content=body, headers=headers)
        assert code == status and message in detail


async def test_a_form_is_refused_with_the_expected_content_type(tmp_path: Path) -> None:
    async with rolling(tmp_path) as server:
        assert await server.refused("/end_episode", data={"reward": "1"}) == (422, NOT_AN_OBJECT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": ["a", 1]}, "rewards.0: must be a number, not text, got 'a'"),
        ({"rewards": [1, [1]]}, "rewards.1: Input should be a valid number, got [1]"),
        ({"rewards": [0.5, 1e308]}, "rewards.1: Input should be less than or equal"),
        ({"rewards": "11"}, "rewards: Input should be a valid list"),
        ({"rewards": [1.0] * 257}, "rewards: List should have at most 256 items"),
        ({"group_id": ""}, "group_id: String should have at least 1"),
        ({"group_id": "x" * 10_240}, "group_id: String should have at most"),
        ({"served": -1}, "served: Input should be greater than or equal to 0, got -1"),
        ({"served": "first"}, "served: Input should be a valid integer"),
    ],
)
async def test_an_invalid_end_of_a_group_is_refused(
    tmp_path: Path, changes: Json, message: str
) -> None:
    async with rolling(tmp_path) as server:
        end = {"group_id": "g", "rewards": [1.0, 0.0]} | changes
        code, detail = await server.refused("/end_group", json=end)
        assert code == 422 and detail.startswith(message)


LATER_STATES = {
    "rolling": (),
    "rolling_post": (EngineStatus.ROLLING_POST,),
    "weight_syncing": (EngineStatus.ROLLING_POST, EngineStatus.WEIGHT_SYNCING),
    "booting": (EngineStatus.BOOTING,),
    "offline": (EngineStatus.OFFLINE,),
}


@pytest.mark.parametrize("states", LATER_STATES.values(), ids=LATER_STATES)
async def test_in_every_state_a_claimed_episode_can_be_ended_once(
    tmp_path: Path, states: tuple[EngineStatus, ...]
) -> None:
    async with rolling(tmp_path) as server:
        uuid = await server.claim()
        server.move(*states)
        first = await server.http.post("/end_episode", json=end_body(uuid))
        again = await server.http.post("/end_episode", json=end_body(uuid))
        assert (first.status_code, again.status_code) == (200, 200)
        code, detail = await server.refused("/end_episode", json=end_body(uuid, 0.0))
        assert code == 409 and "send the same body again" in detail
        assert server.state.pool.counts.num_episodes == 1


async def test_an_aborted_claim_and_the_next_claim_are_kept_apart(tmp_path: Path) -> None:
    async with rolling(tmp_path) as server:
        first = await server.claim()
        assert (await server.http.post("/abort_episode", json=end_body(first))).json()["success"]
        second = await server.claim()
        assert second[:-4] == first[:-4]
        code, detail = await server.refused("/end_episode", json=end_body(first))
        assert code == 400 and "try increase `discard_episode_timeout`" in detail
        assert (await server.http.post("/abort_episode", json=end_body(first))).json()["success"]
        assert [one.uuid for one in server.state.episodes.claimed] == [second]


async def test_ending_an_episode_without_a_call_gives_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cause of such an episode: its agent called another server, or sent another key."""
    async with rolling(tmp_path) as server:
        uuid = await server.claim()
        reply = (await server.http.post("/end_episode", json=end_body(uuid))).json()
        assert (await server.http.post("/end_episode", json=end_body(uuid))).json() == reply
        assert reply["success"] and "base URL with the key" in reply["warning"]
        assert uuid in caplog.text and reply["warning"] in caplog.text


async def test_an_agreement_that_no_step_needs_is_refused_with_the_methods_that_do(
    tmp_path: Path,
) -> None:
    async with rolling(tmp_path) as server:
        code, detail = await server.refused("/agree_sync_weight", json={"client_uuid": "me"})
        assert code == 400 and detail.endswith("Set a method that ends in agree_sync_weight.")


@pytest.mark.parametrize("path", ["/load_policy", "/unload_policy"])
async def test_a_version_is_refused_with_503_while_no_engine_serves(
    tmp_path: Path, path: str
) -> None:
    async with rolling(tmp_path) as server:
        status, detail = await server.refused(path, json={"version": 3})
    assert status == 503
    assert "engine" in detail
