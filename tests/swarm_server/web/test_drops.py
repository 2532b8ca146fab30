"""Dropped groups: each is counted once by its reason, and the counts survive restarts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import httpx
import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Run
from swarm_server.samples import call
from swarm_server.training.intake_server import IntakeServer

from fakevllm_adapters.protocol.swarm import EngineStatusReply
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.journal import migrations
from fakevllm_server.journal.migrations import m001_tables
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.log import RunLog
from fakevllm_server.web.app import create_app


async def test_each_dropped_group_is_counted_once_also_across_restarts(tmp_path: Path) -> None:
    server = IntakeServer(tmp_path / "run")
    server.restart(filter_groups="drop", entropy_coeff=0.0)
    await server.capture("tied")
    assert (await server.end_group("tied", 1.0, 1.0)).failure_reason == "tied"
    await server.end_group("tied", 1.0, 1.0)  # sent again
    masked = call(untrainable="missing_logprob")
    await server.capture("masked", masked, masked)
    await server.end_group("masked", 1.0, 0.0)
    await server.capture("closed")
    await server.end_group("closed", 1.0, 0.0, closed="training_finished")
    await server.capture("aborted")
    await server.process.intake.abort_group("aborted")
    server.process.log.record_drops(1, {"dropped twice": "stale"})
    server.process.log.record_drops(1, {"dropped twice": "stale"})
    await server.capture("pooled")
    await server.end_group("pooled")
    server.process.log.record_drops(1, {"pooled": "stale"})
    episode = await server.play()
    await server.end(episode.uuid, closed="training_finished")

    expected = {
        "stale": 2,
        "training_finished": 2,
        "aborted": 1,
        "no_trainable_call": 1,
        "tied": 1,
    }
    assert server.process.journal.drain()
    assert server.process.log.drops == expected
    server.kill_and_restart()
    assert server.process.log.drops == expected
    server.restart()
    assert server.process.log.drops == expected
    server.process.close()


async def test_groups_that_an_older_version_dropped_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", [m001_tables])
        Journal(tmp_path / "journal.sqlite").close()
    db = sqlite3.connect(tmp_path / "journal.sqlite")
    with db:
        for name, state, reason in (
            ("a", "dropped", "no_trainable_call: x"),
            ("b", "dropped", "no_trainable_call: y"),
            ("c", "consumed", None),
        ):
            row = (name, state, reason)
            db.execute("INSERT INTO groups (group_id, state, reason) VALUES (?, ?, ?)", row)
    db.close()
    journal = Journal(tmp_path / "journal.sqlite")
    assert RunLog(journal).drops == {"no_trainable_call": 2}
    journal.close()


async def test_a_step_reports_the_groups_dropped_since_the_previous_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fakevllm.server")
    run = Run(tmp_path, LocalBackend(), JOB.model_copy(update={"filter_groups": "collect"}))
    await run.rolling()
    for name in ("x", "y"):
        await run.capture(name, call(), call())
        assert (await run.end_group(name, 1.0, 1.0)).failure_reason == "tied"
    for name in ("a", "b"):
        await run.finish_group(name)
        await run.trained(name)
    first, second = [one.metrics for one in run.log.entries_after(0) if one.kind == "step"]
    assert first["dropped_tied"] == 2 and "dropped_tied" not in second
    assert "96 tokens" not in caplog.text and "tokens trained, dropped 2 tied" in caplog.text
    assert (run.log.totals["groups"], run.log.totals["tied_groups"]) == (2, 2)
    await run.stop()


async def test_the_engine_status_has_the_dropped_and_the_waiting_groups(tmp_path: Path) -> None:
    app = create_app(ServerConfig("fake", tmp_path))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        await http.post("/abort_group", json={"group_id": "g"})
        answer = (await http.get("/get_engine_status")).json()
    assert EngineStatusReply.model_validate(answer).dropped == {"aborted": 1}
    assert answer["waiting"] == {
        "finished_groups": 0,
        "open_groups": 0,
        "partial_tasks": 0,
        "tokens": 0,
    }
