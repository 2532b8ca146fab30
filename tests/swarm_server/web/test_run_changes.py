"""A server that changes its run: what a failed start leaves, and what does not cross over."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EndGroupReply, EndGroupRequest, SiblingRef
from fakevllm_server.config.model import ConfigError, ServerConfig
from fakevllm_server.journal import reads
from fakevllm_server.journal.external_reader import read_journal_file
from fakevllm_server.journal.store import JOB
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.run.run_directory import RunDirectory
from fakevllm_server.web.server_state import ServerState

FULL = Path("/dev/full")
needs_full_disk = pytest.mark.skipif(not FULL.exists(), reason="no disk that is always full")


class Server:
    """A server process on a run directory, which can be server.state."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.state = ServerState(ServerConfig("fake", run_dir))

    async def restart(self, before: Callable[[], object] = lambda: None) -> None:
        """Stop the server, call `before`, and start the next server process."""
        await self.state.close()
        before()
        self.state = ServerState(ServerConfig("fake", self.run_dir))

    async def start(self, name: str | None, **settings: Any) -> None:
        """Start the engine for an experiment, and stop it again."""
        self.state.job = TrainJob(experiment_name=name, num_repeat=2, **settings)
        async with self.state.engine_lock:
            await self.state.start_engine()
        await self.state.stop_engine()

    async def capture(self, name: str, *siblings: int) -> None:
        for index in siblings:
            await self.state.intake.add_call(SiblingRef(name, index), call())

    async def end(self, name: str) -> EndGroupReply:
        request = EndGroupRequest(group_id=name, rewards=[1.0, 0.0])
        return await self.state.intake.end_group(request, None)

    async def pool_group(self, name: str) -> None:
        await self.capture(name, 0, 1)
        assert (await self.end(name)).pooled


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Server]:
    """A server that has started the engine for the experiment `a`, and has stopped it."""
    server = Server(tmp_path)
    await server.start("a")
    yield server
    await server.state.close()


# --- groups


async def test_a_group_that_was_begun_in_another_run_is_never_completed_in_this_run(
    server: Server,
) -> None:
    await server.capture("open", 0)
    await server.pool_group("ended")
    for name in ("b", "c"):
        await server.start(name)
        for group in ("open", "ended"):
            await server.capture(group, 0, 1)
            reply = await server.end(group)
            assert (reply.success, reply.failure_reason) == (False, "other_job")
        assert set(server.state.pool.waiting.values()) == {0} and server.state.runlog.drops == {}
    await server.restart()
    await server.capture("open", 1)
    assert (await server.end("open")).failure_reason == "other_job"
    await server.pool_group("new")


async def test_an_open_group_is_completed_when_its_own_run_continues(server: Server) -> None:
    await server.capture("open", 0)
    await server.start("b")
    await server.capture("open", 1)
    await server.start("a")
    await server.capture("open", 1)
    reply = await server.end("open")
    assert reply.pooled and [len(calls) for calls in reply.calls] == [1, 1]


async def test_the_limit_of_steps_of_the_next_job_does_not_end_the_run_before(
    server: Server,
) -> None:
    await server.start("a")
    server.state.runlog.last_step = 5
    server.state.job = TrainJob(experiment_name="b", num_repeat=2, total_training_steps=3)
    assert server.state.closed_reason is None
    await server.start("a", total_training_steps=4)
    assert server.state.closed_reason == "training_finished"
    server.state.job = TrainJob(experiment_name="a", num_repeat=2, total_training_steps=9)
    assert server.state.closed_reason is None, "the run goes on with a higher limit"


# --- starts that change nothing but the way of training


@pytest.mark.parametrize(
    ("name", "settings"),
    [("a", {"model": "another"}), (None, {}), (None, {"model": "another"}), ("a", {"lr": 0.5})],
    ids=str,
)
async def test_what_waits_is_kept_if_neither_model_nor_run_nor_reward_changes(
    server: Server, name: str | None, settings: dict[str, Any]
) -> None:
    before = server.state.intake.job_hash
    await server.pool_group("waits")
    await server.start(name, **settings)
    assert (server.state.run.relative, server.state.pool.num_finished) == (".", 1)
    assert server.state.runlog.drops == {} and server.state.intake.job_hash == before


async def test_a_job_that_rewards_otherwise_drops_what_waits_also_after_a_restart(
    server: Server,
) -> None:
    before = server.state.intake.job_hash
    await server.pool_group("waits")
    await server.restart()
    assert server.state.intake.job_hash == before != ""
    await server.start("a", use_kl_in_reward=True)
    assert server.state.journal.drain() and server.state.runlog.drops == {"other_job": 1}
    assert server.state.intake.job_hash not in (before, "")


async def test_groups_of_an_older_server_are_kept_although_it_stored_only_the_job(
    server: Server, tmp_path: Path
) -> None:
    before = server.state.intake.job_hash
    await server.pool_group("waits")
    await server.restart(partial(forget_identity, tmp_path))
    assert server.state.intake.job_hash == ""
    await server.start(None, model="another")
    assert (server.state.pool.num_finished, server.state.runlog.drops) == (1, {})
    assert server.state.intake.job_hash == before


def forget_identity(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as db, db:
        db.execute("DELETE FROM meta WHERE key = 'job_identity'")


# --- starts that fail


def no_space_for_the_id(run: Path) -> Path:
    run.mkdir(parents=True)
    file = run / "run_id.tmp"
    file.symlink_to(FULL)
    return file


def torn_model(run: Path) -> Path:
    run.mkdir(parents=True)
    file = run / "model.json"
    file.write_text('{"backend": "fa')
    return file


def other_trainer(run: Path) -> Path:
    run.mkdir(parents=True)
    file = run / "model.json"
    file.write_text('{"backend": "embedded", "model": "m", "fingerprint": null}')
    return file


def no_space_for_the_choice(run: Path) -> Path:
    file = run.parent.parent / "current_run.tmp"
    file.symlink_to(FULL)
    return file


def damaged_journal(run: Path) -> Path:
    run.mkdir(parents=True)
    file = run / "journal.sqlite"
    file.write_bytes(b"no database" * 1000)
    return file


@needs_full_disk
@pytest.mark.parametrize(
    "prevent",
    [no_space_for_the_id, torn_model, other_trainer, no_space_for_the_choice, damaged_journal],
)
async def test_a_start_that_fails_keeps_the_run_and_releases_the_other_run(
    server: Server, tmp_path: Path, prevent: Callable[[Path], Path]
) -> None:
    await server.start("b")
    await server.start("a")
    before = server.state.run
    server.state.engine.global_step = 7
    obstacle = prevent(tmp_path / "runs/new")
    with pytest.raises(ConfigError):
        await server.start("new")
    assert server.state.run is before and server.state.engine.global_step == 7
    assert RunDirectory(tmp_path).current == "."
    await server.state.stop_engine()
    RunFolder(tmp_path / "runs/new").close()  # the lock is free
    await server.pool_group("g")  # the run goes on
    obstacle.unlink()
    await server.start("new")
    assert server.state.run.relative == RunDirectory(tmp_path).current == "runs/new"


@needs_full_disk
async def test_a_server_does_not_resume_a_run_whose_start_failed(
    server: Server, tmp_path: Path
) -> None:
    obstacle = no_space_for_the_choice(tmp_path / "runs/new")
    with pytest.raises(ConfigError):
        await server.start("new")
    obstacle.unlink()
    (tmp_path / "current_run").write_text("runs/new\n")
    await server.restart()
    assert server.state.run.relative == "runs/new" and not server.state.run.engine_runs


async def test_a_run_becomes_current_only_after_its_journal_has_the_job(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_current = RunDirectory.make_current
    jobs: list[str | None] = []

    def record(runs: RunDirectory, relative: str) -> None:
        journal = tmp_path / relative / "journal.sqlite"
        jobs.append(read_journal_file(journal, reads.meta, JOB))
        make_current(runs, relative)

    monkeypatch.setattr(RunDirectory, "make_current", record)
    await server.start("b")
    assert server.state.job is not None and jobs == [server.state.job.as_yaml()]


@needs_full_disk
def test_a_server_that_cannot_open_its_run_says_why_and_releases_the_run_directory(
    tmp_path: Path,
) -> None:
    no_space = no_space_for_the_id(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"run cannot be opened \(No space left on device\)"):
            ServerState(ServerConfig("fake", tmp_path / "run"))
    no_space.unlink()
    RunFolder(tmp_path / "run").close()


async def test_a_run_without_a_step_is_logged_as_new(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await server.start("a")
    server.state.runlog.last_step = 3
    await server.start("b")
    lines = [line for line in caplog.messages if " run in " in line]
    assert lines == [f"new run in {server.run_dir / 'runs/b'}"]
