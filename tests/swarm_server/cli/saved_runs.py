"""Runs of a real server with the fake engine, and calls of the command `checkpoints`."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from swarm_server.samples import call
from typer.testing import CliRunner, Result

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import (
    EndGroupReply,
    EndGroupRequest,
    EngineStatus,
    SiblingRef,
)
from fakevllm_server.cli.main import app
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.server_state import ServerState

JOB = TrainJob(num_repeat=2, batch_size=1, lr=0.1, save_freq=2)
GROUPS = ["a", "b", "c", "d", "e"]
YES, NO = [ord("y"), 5], [ord("n"), 5]


class RunningServer:
    """A server with a fake engine that trains one group per step."""

    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def train(self, name: str, *rewards: float) -> None:
        before = self.state.runlog.last_step
        assert (await self.end_group(name, *rewards)).pooled
        await self.until(lambda: self.state.runlog.last_step > before)

    async def end_group(self, name: str, *rewards: float) -> EndGroupReply:
        rewards = rewards or (1.0, 0.0)
        for index, ids in enumerate((YES, NO)):
            sampled = replace(call(self.state.engine.version), response_ids=ids)
            await self.state.intake.add_call(SiblingRef(name, index), sampled)
        end = EndGroupRequest(group_id=name, rewards=list(rewards))
        reply = await self.state.intake.end_group(end, self.state.closed_reason)
        self.state.notify_loop()
        return reply

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds and the engine collects groups."""
        async with asyncio.timeout(30):
            while not (condition() and self.state.engine.status is EngineStatus.ROLLING):
                await self.state.engine.next_move()


@asynccontextmanager
async def running_server(run_dir: Path, job: TrainJob = JOB) -> AsyncGenerator[RunningServer]:
    state = ServerState(ServerConfig("fake", run_dir))
    try:
        state.job = job
        async with state.engine_lock:
            await state.start_engine()
        server = RunningServer(state)
        await server.until(lambda: True)
        yield server
    finally:
        await state.close()


def run_command(run_dir: Path, *arguments: str, answer: str | None = None) -> Result:
    command = ["checkpoints", *arguments, "--run-dir", str(run_dir)]
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, command, input=answer)


def list_json(run_dir: Path) -> list[dict[str, object]]:
    return json.loads(run_command(run_dir, "list", "--json").stdout)


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def theta(run_dir: Path, step: int) -> float:
    return json.loads((checkpoint_folder(run_dir, step) / "theta.json").read_text())["theta"]


@contextmanager
def open_journal(run_dir: Path) -> Generator[sqlite3.Connection]:
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as db, db:
        yield db


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".sqlite-wal", ".sqlite-shm")
    }
