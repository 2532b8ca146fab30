"""The routes of releases: replies, keys, repeated requests and the engine that is off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.local_engines import LocalRollout
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.keys import KeyRing, Role, named_key
from fakevllm_adapters.protocol.releases import MAX_EVIDENCE_BYTES, ReleasesReply
from fakevllm_adapters.protocol.swarm import EndGroupRequest, EngineStatus, SiblingRef
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.journal import reads
from fakevllm_server.rollout.engine_client import EngineClient
from fakevllm_server.training import loop
from fakevllm_server.training.policies import MAX_UNPINNED
from fakevllm_server.types.backend import Endpoint, Rollout
from fakevllm_server.web import server_state
from fakevllm_server.web.app import create_app
from fakevllm_server.web.server_state import ServerState

KEYS = KeyRing(
    [
        named_key("sk-root", "root", "2026-11-26"),
        named_key("sk-bob", "bob", "2026-11-26", Role.CLIENT),
    ]
)
OPEN = KeyRing()
JOB = TrainJob(num_repeat=2, batch_size=1, lr=0.1, save_freq=1, max_staleness=100)


class HoldingBackend(LocalBackend):
    """A backend whose engine holds policies."""

    @property
    def rollout(self) -> Rollout:
        return cast("Rollout", self)

    async def policies(self) -> dict[str, int]:
        return dict(self.names.loaded)


class Server:
    """A server with an engine in this process, and its client."""

    def __init__(
        self, state: ServerState, http: httpx.AsyncClient, backends: Sequence[LocalBackend]
    ) -> None:
        self.state, self.http, self._backends = state, http, backends

    @property
    def backend(self) -> LocalBackend:
        return self._backends[-1]

    @property
    def weights(self) -> Path:
        """Folder of the newest checkpoint."""
        return self.state.run.checkpoints.find(self.state.journal.read(reads.checkpoints)[0])

    async def start(self) -> None:
        self.state.job = JOB
        async with self.state.engine_lock:
            await self.state.start_engine()
        await self.rolling()

    async def rolling(self) -> None:
        async with asyncio.timeout(30):
            while self.state.engine.status is not EngineStatus.ROLLING:
                await self.state.engine.next_move()

    async def train(self, name: str) -> None:
        step = self.state.runlog.last_step
        await self.pool_group(name)
        await self.trained_after(step)

    async def pool_group(self, name: str) -> None:
        for index in range(2):
            await self.state.intake.add_call(SiblingRef(name, index), call())
        end = EndGroupRequest(group_id=name, rewards=[1.0, 0.0])
        assert (await self.state.intake.end_group(end, None)).pooled
        self.state.notify_loop()

    async def trained_after(self, step: int) -> None:
        async with asyncio.timeout(30):
            while (
                self.state.runlog.last_step == step
                or self.state.engine.status.value != "ENGINE.ROLLING"
            ):
                await self.state.engine.next_move()

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def weights_of(self, version: int) -> dict[str, Any]:
        return (await self.http.get(f"/get_weights?version={version}")).json()

    async def history(self) -> ReleasesReply:
        return ReleasesReply.model_validate((await self.http.get("/releases")).json())


OpenServer = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def open_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenServer:
    backends: list[LocalBackend] = []

    def open_backend(*_: object) -> LocalBackend:
        backends.append(HoldingBackend())
        return backends[-1]

    async def connect(self: ServerState, endpoint: Endpoint) -> None: ...

    monkeypatch.setattr(server_state, "open_backend", open_backend)
    monkeypatch.setattr(ServerState, "connect", connect)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)

    @asynccontextmanager
    async def opened(keys: KeyRing = OPEN, key: str = "") -> AsyncGenerator[Server]:
        app = create_app(ServerConfig("fake", tmp_path / "run", keys=keys))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers
        ) as http:
            server = Server(app.state.server, http, backends)
            yield server
            await server.state.close()

    return opened


async def test_decisions_are_in_the_history_and_in_the_status(open_server: OpenServer) -> None:
    async with open_server() as server:
        assert (await server.history()).model_dump() == {
            "run_id": server.state.run_id,
            "records": [],
            "released": 0,
            "candidate": None,
            "rejected": [],
            "is_held": False,
            "training_limit": None,
            "released_copies": [0],
            "newest_copies": [0],
            "with_weights": [0],
        }
        await server.start()
        await server.train("a")
        candidate = await server.post("/release", id="gate-1", decision="candidate")
        assert candidate["success"] and candidate["record"]["version"] == 1
        body = {"id": "ours", "decision": "released", "version": 1}
        first, again = await server.post("/release", **body), await server.post("/release", **body)
        assert first == again and first["record"]["decided_by"] == "operator"
        history = await server.history()
        assert [record.decided_by for record in history.records] == ["gate", "operator"]
        assert (history.released, history.candidate, history.with_weights) == (1, None, [0, 1])
        status = (await server.http.get("/get_engine_status")).json()
        assert (status["released"], status["num_releases"]) == (1, 2)
        other = await server.http.post("/release", json=body | {"decision": "rejected"})
        assert other.status_code == 409


async def test_a_decision_names_the_key_of_the_operator_and_needs_an_admins_key(
    open_server: OpenServer,
) -> None:
    async with open_server(KEYS, "sk-root") as server:
        await server.post("/release", id="pause", decision="hold")
        assert (await server.history()).records[0].decided_by == "root"
    async with open_server(KEYS, "sk-bob") as server:
        for method, path in (
            ("GET", "/releases"),
            ("POST", "/release"),
            ("POST", "/rollback"),
            ("POST", "/training_limit"),
        ):
            assert (await server.http.request(method, path)).status_code == 403


async def test_while_no_engine_runs_a_rollback_decides_where_the_next_start_continues(
    open_server: OpenServer,
) -> None:
    async with open_server() as server:
        await server.start()
        for name in "abc":
            await server.train(name)
        await server.post("/release", id="1", decision="released", version=1)
        await server.post("/stop_engine")
        reply = await server.post("/rollback", id="back")
        assert reply["success"] and reply["record"]["evidence"] == {"restored": 1}
        assert (await server.http.get("/get_engine_status")).json()["global_step"] == 2
        assert (await server.post("/release", id="2", decision="candidate"))["success"] is False
        await server.start()
        await server.train("d")
        assert server.state.runlog.last_step == 2
        assert (await server.history()).rejected == [2, 3]
        assert await server.post("/rollback", id="back") == reply


async def test_retention_keeps_the_checkpoint_of_a_version_that_answers_apps(
    open_server: OpenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def export(self: object, checkpoint: Path, to: Path) -> None:
        to.mkdir()
        (to / "theta.json").write_bytes((checkpoint / "theta.json").read_bytes())

    rollout = LocalRollout()
    endpoint = replace(await rollout.launch(), holds_policies=True)
    monkeypatch.setattr("fakevllm_server.training.policies.PolicyLoader._export", export)
    async with open_server() as server:
        await server.start()
        monkeypatch.setattr(HoldingBackend, "rollout", property(lambda self: rollout))
        await server.train("first")
        assert server.state.policies is not None
        assert await server.state.policies.load(1, endpoint, pinned=True) == "policy-1"
        for name in "abcdef":
            await server.train(name)
        versions = {one.version for one in server.state.journal.read(reads.checkpoints)}
        assert 1 in versions and 2 not in versions


async def test_an_invalid_decision_is_refused_with_the_field(open_server: OpenServer) -> None:
    async with open_server() as server:
        for body in ({"id": "1", "decision": "perhaps"}, {"decision": "hold"}):
            response = await server.http.post("/release", json=body)
            assert response.status_code == 422
            assert ("decision" if "id" in body else "id") in response.json()["detail"]


async def test_a_rejected_version_is_unloaded_with_the_decision(open_server: OpenServer) -> None:
    async with open_server() as server:
        await server.start()
        await server.train("a")
        await server.train("b")
        endpoint = Endpoint(None, "http://engine", "fake", 4096, holds_policies=True)
        server.state.engine_client = EngineClient(endpoint)
        for version in (1, 2):
            await server.backend.load_policy(f"policy-{version}", server.weights, version)
        await server.post("/release", id="1", decision="rejected", version=2)
        assert dict(server.backend.names.loaded) == {"policy-1": 1}


async def test_a_version_for_which_there_is_no_room_now_is_refused_as_temporary(
    open_server: OpenServer,
) -> None:
    async with open_server() as server:
        await server.start()
        for name in "abcde":
            await server.train(name)
        endpoint = Endpoint(None, "http://engine", "fake", 4096, holds_policies=True)
        server.state.engine_client = EngineClient(endpoint)
        for version in range(1, MAX_UNPINNED + 1):
            await server.backend.load_policy(f"policy-{version}", server.weights, version)
            assert (await server.post("/load_policy", version=version))["success"]
        full = await server.post("/load_policy", version=5)
        assert not full["success"] and full["is_temporary"] and "in use" in full["failure_reason"]
        unknown = await server.post("/load_policy", version=9)
        assert not unknown["success"] and not unknown["is_temporary"]


async def test_a_decision_about_another_run_is_refused(open_server: OpenServer) -> None:
    async with open_server() as server:
        for path, body in (("/release", {"decision": "hold"}), ("/rollback", {})):
            reply = await server.post(path, id=path, run_id="another", **body)
            assert not reply["success"] and "about the run another" in reply["failure_reason"]
        own = {"id": "1", "decision": "hold"}
        first = await server.post("/release", run_id=server.state.run_id, **own)
        assert first["success"] and await server.post("/release", **own) == first


async def test_evidence_is_bounded_and_cannot_name_the_restored_version(
    open_server: OpenServer,
) -> None:
    async with open_server() as server:
        for evidence in ({"restored": 5}, {"note": "x" * MAX_EVIDENCE_BYTES}):
            body = {"id": "1", "decision": "hold", "evidence": evidence}
            response = await server.http.post("/release", json=body)
            assert response.status_code == 422 and "evidence" in response.json()["detail"]
        assert (await server.post("/release", **body | {"evidence": {"pairs": 3}}))["success"]


async def test_a_restored_version_has_the_digest_of_the_weights_that_it_copies(
    open_server: OpenServer,
) -> None:
    async with open_server() as server:
        await server.start()
        await server.train("a")
        await server.train("b")
        await server.post("/release", id="1", decision="released", version=1)
        await server.post("/rollback", id="back")
        await server.rolling()
        assert server.state.engine.version == 3
        await server.train("c")
        one, restored, newest = [await server.weights_of(version) for version in (1, 3, 4)]
        assert one["digest"] is not None and restored == one | {"version": 3}
        assert (one["checkpoint_step"], newest["checkpoint_step"]) == (1, 2)


async def test_the_limit_of_training_is_in_the_status_and_holds_after_a_restart(
    open_server: OpenServer,
) -> None:
    async with open_server() as server:
        run_id = server.state.run_id
        reply = await server.post("/training_limit", version=1, run_id=run_id)
        assert reply == {"success": True, "failure_reason": ""}
        await server.start()
        await server.train("a")
        await server.pool_group("b")
    async with open_server() as server:
        await server.start()
        status = (await server.http.get("/get_engine_status")).json()
        assert (status["training_limit"], status["weight_version"]) == (1, 2)
        assert status["backlog"] == 1 and server.state.runlog.last_step == 1
        assert (await server.history()).training_limit == 1
        assert (await server.post("/training_limit"))["success"]
        await server.trained_after(1)
        assert (await server.http.get("/get_engine_status")).json()["training_limit"] is None


async def test_a_limit_of_training_for_another_run_is_refused(open_server: OpenServer) -> None:
    async with open_server() as server:
        reply = await server.post("/training_limit", version=1, run_id="another")
        assert not reply["success"] and "about the run another" in reply["failure_reason"]
        assert server.state.run.releases.training_limit is None
        response = await server.http.post("/training_limit", json={"version": -1})
        assert response.status_code == 422 and "version" in response.json()["detail"]
