"""The server in lockstep: claims, engine support, the backlog, and shuffled rewards."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Run
from swarm_server.pools import ended
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.training import step
from fakevllm_server.training.step_plan import plan_step
from fakevllm_server.types.backend import ActionFailed
from fakevllm_server.types.calls import FinishedGroup, ScoredEpisode
from fakevllm_server.web.routes import control, episodes
from fakevllm_server.web.server_state import ServerState


def rolling_server(folder: Path, job: TrainJob) -> ServerState:
    swarm = ServerState(ServerConfig("fake", folder))
    swarm.job = job
    swarm.intake.resume(job, now=0.0)
    for status in (EngineStatus.BOOTING, EngineStatus.ROLLING):
        swarm.engine.move(status, 0.0)
    return swarm


def http_client(swarm: ServerState) -> httpx.AsyncClient:
    app = FastAPI()
    for module in (control, episodes):
        app.include_router(module.router(swarm))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def test_the_status_reports_lockstep_and_training_claims_are_refused(
    tmp_path: Path,
) -> None:
    swarm = rolling_server(tmp_path, TrainJob(lockstep=True))
    async with http_client(swarm) as http:
        status = EngineStatusReply.model_validate((await http.get("/get_engine_status")).json())
        claims = {
            kind: (
                await http.post("/claim_episode", json={"client_uuid": "me", "episode_type": kind})
            ).json()
            for kind in ("train", "eval")
        }
    await swarm.close()
    assert status.lockstep
    assert "The job is in lockstep" in claims["train"]["fail_cause"]
    assert "lockstep" not in claims["eval"]["fail_cause"]


async def test_an_engine_without_support_for_lockstep_is_not_started(tmp_path: Path) -> None:
    swarm = ServerState(ServerConfig("fake", tmp_path))
    async with http_client(swarm) as http:
        job = TrainJob(lockstep=True).as_yaml()
        assert (await http.post("/sync_train_config", json={"yaml_as_string": job})).json()[
            "success"
        ]
        reply = (await http.post("/start_engine")).json()
    await swarm.close()
    assert not reply["success"] and "start the server with --backend embedded" in reply["error"]


async def test_a_due_step_with_few_groups_is_a_backlog_of_one(tmp_path: Path) -> None:
    """Otherwise the next request would be sampled while the step is trained."""
    job = TrainJob(batch_size=4, filter_groups="collect", max_num_gen_batches=1)
    swarm = rolling_server(tmp_path, job)
    for name in "abc":
        assert ended(swarm.pool, name, 0.0, 0.0) == "tied"
    assert swarm.backlog == 0
    assert ended(swarm.pool, "d", 1.0, 0.0) == ""
    assert swarm.backlog == 1
    await swarm.close()


async def test_groups_that_wait_for_an_agreement_are_no_backlog(tmp_path: Path) -> None:
    """Otherwise a client that waits until no step is due would wait forever."""
    method = "rollout_until_all_clients_agree_sync_weight"
    swarm = rolling_server(
        tmp_path, TrainJob(batch_size=1, swarm_mode_sample_collection_method=method)
    )
    for name in "ab":
        assert ended(swarm.pool, name, 1.0, 0.0) == ""
    assert swarm.backlog == 0
    swarm.pool.clients.add("me", 0.0)
    swarm.pool.clients.agree("me", 0.0)
    assert swarm.backlog == 1
    await swarm.close()


async def test_a_step_that_will_be_retried_is_a_backlog_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "RETRY_STEP_AFTER_S", 3600.0)
    run = Run(tmp_path, LocalBackend())
    run.backend.plan("step", ActionFailed("no"))
    await run.finish_group("a")
    await run.backend.step_begun.wait()
    await run.rolling()
    swarm = rolling_server(tmp_path / "server", JOB)
    assert swarm.backlog == 0
    swarm._loop = run.loop  # pyright: ignore[reportPrivateUsage]
    assert swarm.backlog == 1
    for status in (EngineStatus.ROLLING_POST, EngineStatus.WEIGHT_SYNCING):
        swarm.engine.move(status, 0.0)
    assert swarm.backlog == 0, "replay goes on while a step is made"
    swarm._loop = None  # pyright: ignore[reportPrivateUsage]
    await swarm.close()
    await run.stop()


def test_shuffled_rewards_do_not_depend_on_the_groups_ids() -> None:
    job = TrainJob(control="shuffled", algorithm="rloo")

    def advantages(prefix: str) -> list[float]:
        groups = [
            FinishedGroup(
                f"{prefix}{at}",
                [ScoredEpisode(index, float(index == 0), [call()]) for index in range(4)],
            )
            for at in range(8)
        ]
        return [one.advantages[0] for one in plan_step(1, groups, job).batch.calls]

    assert advantages("g") == advantages("h")
    by_group = [tuple(advantages("g")[at : at + 4]) for at in range(0, 32, 4)]
    assert len(set(by_group)) > 1
