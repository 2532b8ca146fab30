"""Start, stop and close of the server's state, with the fake engine as a child process."""

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from swarm_server.local_engines import LocalRollout
from typer.testing import CliRunner

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.cli.main import app
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.fleet.rollout import FleetRollout
from fakevllm_server.fleet.router import NO_AFFINITY, CallAffinity
from fakevllm_server.journal import row_changes
from fakevllm_server.journal.store import Journal
from fakevllm_server.rollout.engine_client import EngineClient
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.web import server_state
from fakevllm_server.web.app import create_app
from fakevllm_server.web.server_state import ServerState
from tests.swarm_server.journal.disk_faults import Disk


class CountingFleet(FleetRollout):
    """A fleet that counts how often calls ask for a replica."""

    num_asked = 0

    async def client_for(
        self, call: CallAffinity = NO_AFFINITY, failed: EngineClient | None = None
    ) -> EngineClient | None:
        self.num_asked += 1
        return await super().client_for(call, failed)


async def start_engine(state: ServerState) -> None:
    async with state.engine_lock:
        await state.start_engine()


async def wait_until_rolling(state: ServerState) -> None:
    async with asyncio.timeout(20):
        while state.engine.status is not EngineStatus.ROLLING:
            await asyncio.sleep(0.02)


async def test_a_start_during_a_stop_waits_for_the_stop_and_keeps_its_socket(
    tmp_path: Path,
) -> None:
    state = ServerState(ServerConfig("fake", tmp_path))
    state.job = TrainJob()
    await start_engine(state)
    await wait_until_rolling(state)
    await asyncio.gather(state.stop_engine(), state.stop_engine(), start_engine(state))
    await wait_until_rolling(state)
    assert list(tmp_path.glob("engine-*.sock"))
    await state.close()
    assert not list(tmp_path.glob("engine-*.sock"))


async def test_a_job_that_is_synced_during_a_start_is_refused_and_not_trained(
    tmp_path: Path,
) -> None:
    app = create_app(ServerConfig("fake", tmp_path))
    state: ServerState = app.state.server
    state.job = TrainJob(experiment_name="a")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        other = {"yaml_as_string": TrainJob(experiment_name="b").as_yaml()}
        async with state.engine_lock:
            sync = asyncio.create_task(http.post("/sync_train_config", json=other))
            await asyncio.wait([sync], timeout=0.2)
            assert not sync.done() and state.job.experiment_name == "a"
            await state.start_engine()
        reply = await sync
    assert reply.status_code == 400 and "already started" in reply.json()["detail"]
    assert (state.job.experiment_name, state.run.relative) == ("a", ".")
    await state.close()


async def test_a_closed_server_releases_its_run_directory(tmp_path: Path) -> None:
    await ServerState(ServerConfig("fake", tmp_path)).close()
    RunFolder(tmp_path).close()


async def test_the_status_has_the_start_of_the_process_and_the_names_of_its_engines(
    tmp_path: Path,
) -> None:
    earliest = time.time()
    app = create_app(ServerConfig("fake", tmp_path))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        status = (await http.get("/get_engine_status")).json()
    await app.state.server.close()
    assert earliest <= status["started_at"] <= time.time()
    assert (status["rollout"], status["trainer"]) == ("fake", "fake")


def test_a_second_server_on_a_run_directory_is_refused(tmp_path: Path) -> None:
    first = RunFolder(tmp_path)
    arguments = ["start", "--backend", "fake", "--port", "0", "--run-dir", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    first.close()
    assert result.exit_code == 2
    assert "is used by another server: choose another --run-dir" in result.output


@pytest_asyncio.fixture
async def interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[ServerState, httpx.AsyncClient]]:
    """The state and a client of a server whose predecessor died while its engine was running. The
    lifespan of its app does not run."""
    monkeypatch.setattr(Journal.wait_written, "__defaults__", (0.2,))
    app = create_app(ServerConfig("fake", tmp_path))
    state: ServerState = app.state.server
    state.job = TrainJob()
    job = row_changes.meta_set("job", state.job.as_yaml())
    state.journal.put(job, row_changes.meta_set("engine_runs", "yes"))
    assert state.journal.drain()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield state, http
    await state.close()


async def test_an_interrupted_run_is_resumed_as_soon_as_the_full_disk_has_room(
    interrupted: tuple[ServerState, httpx.AsyncClient],
) -> None:
    state, http = interrupted
    disk = Disk(state.journal)
    disk.refuse()
    await state.resume()
    assert state.engine.status is EngineStatus.OFFLINE
    health = await http.get("/health")
    assert health.status_code == 503
    assert "is started when the journal can be written again" in health.json()["detail"]
    status = (await http.get("/get_engine_status")).json()
    assert status["engine_status_detail"] == health.json()["detail"]
    disk.accept()
    await wait_until_rolling(state)
    assert state.detail is None
    assert (await http.get("/health")).json() == {"status": "ok"}


async def test_a_client_may_start_the_engine_before_the_interrupted_run_is_resumed(
    interrupted: tuple[ServerState, httpx.AsyncClient],
) -> None:
    state, http = interrupted
    disk = Disk(state.journal)
    disk.refuse()
    await state.resume()
    assert (await http.post("/start_engine")).status_code == 503
    disk.accept()
    async with asyncio.timeout(20):
        while (await http.post("/start_engine")).status_code == 503:
            await asyncio.sleep(0.02)
    await wait_until_rolling(state)


async def test_a_stop_ends_the_wait_for_a_full_disk(
    interrupted: tuple[ServerState, httpx.AsyncClient],
) -> None:
    state, _ = interrupted
    disk = Disk(state.journal)
    disk.refuse()
    await state.resume()
    await state.stop_engine()
    disk.accept()
    assert state.journal.drain()
    await asyncio.sleep(0)
    assert state.engine.status is EngineStatus.OFFLINE and state.detail is None


async def test_a_serving_server_stays_healthy_while_its_disk_is_full(
    interrupted: tuple[ServerState, httpx.AsyncClient],
) -> None:
    state, http = interrupted
    await state.resume()
    await wait_until_rolling(state)
    disk = Disk(state.journal)
    disk.refuse()
    state.journal.put(row_changes.meta_set("a", "b"))
    async with asyncio.timeout(20):
        while state.journal.error is None:
            await asyncio.sleep(0.02)
    assert (await http.get("/health")).status_code == 200
    assert "cannot be written" in (state.detail or "")
    disk.accept()


async def test_the_status_shows_the_replicas_while_they_start(tmp_path: Path) -> None:
    app = create_app(ServerConfig("fake", tmp_path, replicas=2))
    state: ServerState = app.state.server
    state.job = TrainJob()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

        async def replicas() -> list[tuple[str, str]]:
            reply = await http.get("/get_engine_status")
            return [(one["name"], one["state"]) for one in reply.json()["replicas"]]

        assert await replicas() == []
        await start_engine(state)
        assert state.engine.status is EngineStatus.BOOTING
        assert await replicas() == [("replica-0", "starting"), ("replica-1", "starting")]
        assert (await http.get("/metrics")).status_code == 503
        await wait_until_rolling(state)
        assert await replicas() == [("replica-0", "serving"), ("replica-1", "serving")]
        await state.stop_engine()
        assert await replicas() == []
    await state.close()


async def test_after_a_refused_start_the_status_shows_no_replicas(tmp_path: Path) -> None:
    config = ServerConfig("fake", tmp_path, replicas=2, engine_args=["--no-such-flag"])
    app = create_app(config)
    state: ServerState = app.state.server
    state.job = TrainJob()
    await start_engine(state)
    async with asyncio.timeout(30):
        while state.engine.status is not EngineStatus.OFFLINE:
            await state.engine.next_move()
    assert state.replicas == []
    await state.close()


async def test_a_call_waits_for_an_event_while_all_replicas_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_state, "HEALTH_CHECK_INTERVAL_S", 60.0)
    state = ServerState(ServerConfig("fake", tmp_path))
    replica = LocalRollout()
    state.fleet = fleet = CountingFleet({"replica-0": replica}, tmp_path / "kept")
    for status in (EngineStatus.BOOTING, EngineStatus.ROLLING):
        state.engine.move(status, time.monotonic())
    state.engine_client = EngineClient(await fleet.launch())
    replica.may_launch.clear()
    replica.die("it was killed")
    await fleet.lost()
    call = asyncio.create_task(state.wait_until_serving())
    await asyncio.wait([call], timeout=0.3)
    assert not call.done() and fleet.num_asked == 1
    replica.may_launch.set()
    async with asyncio.timeout(20):
        assert await call is not None
    assert fleet.num_asked == 2
    await fleet.close()
    await state.close()
