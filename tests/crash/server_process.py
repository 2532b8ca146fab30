"""One server process with its client, from its start to the end of the script or to a crash.

    CRASH_AT=plan.after_commit python -m crash.server_process RUN_DIR

This command ends with status 137 at the crash point. The same command without CRASH_AT continues
the script.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from pathlib import Path

from crash import wrong_orders
from crash.client import Ack, Client
from crash.lineage_backend import FAR, POISON, LineageBackend
from swarm_server.journal.disk_faults import Disk

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.releases import Decision
from fakevllm_adapters.protocol.swarm import SiblingRef
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.journal import group_commit_writer
from fakevllm_server.training import loop, step
from fakevllm_server.types import crash_points
from fakevllm_server.types.backend import Backend, Endpoint
from fakevllm_server.web import server_state
from fakevllm_server.web.server_state import ServerState

_JOB = {
    "batch_size": 1,
    "lr": 0.1,
    "save_freq": 2,
    "filter_groups": True,
    "max_staleness": 100,
    "partial_after_s": 1e6,  # the script lets claims expire, but no tasks
}
TASKS_OF_THREE = TrainJob.model_validate({**_JOB, "num_repeat": 3})
TASKS_OF_TWO = TrainJob.model_validate({**_JOB, "num_repeat": 2})
NUM_TORN = 3
"""Number of the newest checkpoints to damage.

The best checkpoint is older, and so are the calls that were deleted after training."""
OUTAGE_S, POLL_S, OUTAGE_LIMIT_S = 0.2, 0.005, 5.0


class LocalSwarm(ServerState):
    """A server whose engine runs in the same process, so that it needs no connection."""

    async def connect(self, endpoint: Endpoint) -> None:
        pass


def open_swarm(run_dir: Path) -> LocalSwarm:
    return LocalSwarm(ServerConfig("fake", run_dir))


async def run_server(run_dir: Path, disk: str | None, is_half: bool, async_steps: int) -> None:
    server = open_swarm(run_dir)
    client = Client(server, run_dir, async_steps)
    await client.expire_unacknowledged_claims()
    await server.resume()
    async with asyncio.TaskGroup() as tasks:
        if disk is not None:
            tasks.create_task(_refuse_writes(server, client, *disk.split()))
        await _play_first_half(client)
        if not is_half:
            await _play_second_half(client, run_dir)
    await server.close()


async def _refuse_writes(server: ServerState, client: Client, kind: str, end: str) -> None:
    """Let the disk refuse writes for a while, in the middle of the script.

    `kind` is "full" or "read-only". `end` is "killed" if the server is killed meanwhile, or
    "repaired" if the disk accepts writes again.
    """
    await client.wait_acknowledged("end_group poor-1")
    disk = FullDisk(server.config.run_dir) if kind == "full" else Disk(server.journal)
    disk.refuse()
    async with asyncio.timeout(OUTAGE_LIMIT_S):
        while server.journal.error is None:
            await asyncio.sleep(POLL_S)
    num_acks = client.num_acks
    await asyncio.sleep(OUTAGE_S)
    assert client.num_acks == num_acks, "a request was acknowledged while the disk refused writes"
    assert server.engine.is_serving
    if end == "killed":
        os._exit(crash_points.EXIT_CODE)
    disk.accept()


class FullDisk:
    """A full disk, simulated with a limit on the size of files.

    The limit is the current size of the write-ahead log, which is the largest file.
    """

    def __init__(self, run_dir: Path) -> None:
        self._log = run_dir / "journal.sqlite-wal"
        self._previous_limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def refuse(self) -> None:
        limits = self._log.stat().st_size, self._previous_limits[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def accept(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._previous_limits)


async def _play_first_half(client: Client) -> None:
    await client.start("first", TASKS_OF_THREE)
    served = await client.group("best", 1.0, 0.9)
    await client.group("good", 1.0, 0.9)  # a checkpoint, which remains the best one
    await client.group("tied", 0.5, 0.5)
    await client.call(SiblingRef("aborted", 0))
    await client.abort_group("aborted")
    await client.forget("aborted")
    await client.call(SiblingRef("open", 0))
    await client.sample("feedback", served[0][0])
    await _play_episodes(client)
    await client.group(POISON, 1.0, 0.0)
    await client.group("unsaved", 0.2, 0.0)
    await client.stop("first")  # saves a checkpoint between two regular ones

    await client.start("second", TASKS_OF_TWO)
    await client.until_task_ended("task of two", 2)
    for number in range(5):
        await client.group(f"poor-{number}", 0.2, 0.0)
    await client.stop("second")


async def _play_second_half(client: Client, run_dir: Path) -> None:
    """Damage the newest checkpoints, so that the steps from the third on are lost and reported."""
    await client.once("tear", lambda: _tear(run_dir))

    await client.start("third", TASKS_OF_TWO)
    for number in range(3):
        await client.group(f"again-{number}", 0.2, 0.0)
    for number in range(3):
        await client.group(f"{FAR}-{number}", 0.2, 0.0)  # training stops after the third
    await client.group("after", 0.2, 0.0)
    await client.stop("third")

    await client.start("fourth", TASKS_OF_TWO)
    await client.group("last", 0.2, 0.0)
    await client.stop("fourth")
    await _play_releases(client)


async def _play_releases(client: Client) -> None:
    """Release a version, and reject a later version. Then let training go back to the rejected
    version, and after that to the released version."""
    await client.start("fifth", TASKS_OF_TWO)
    await client.group("released", 0.2, 0.0)
    await client.decide("pause", Decision.HOLD)
    await client.decide("go on", Decision.RESUME)
    candidate = await client.decide("try", Decision.CANDIDATE)  # saves a checkpoint
    await client.decide("promote", Decision.RELEASED, candidate["version"])
    await client.group("rejected-0", 0.2, 0.0)
    worse = await client.decide("try worse", Decision.CANDIDATE)
    await client.group("rejected-1", 0.2, 0.0)
    for index in range(2):
        await client.call(SiblingRef("late", index))
    await client.decide("reject", Decision.REJECTED, worse["version"])
    await client.end_group("late", 0.2, 0.0)
    await client.group("rejected-2", 0.2, 0.0)
    await client.stop("fifth")

    await client.decide("try while off", Decision.CANDIDATE)
    await client.decide("promote by force", Decision.RELEASED, worse["version"], force=True)
    await client.start("sixth", TASKS_OF_TWO)
    await client.group("rejected-3", 0.2, 0.0)
    await client.roll_back("return to worse", worse["version"])
    await client.group("rejected-4", 0.2, 0.0)
    await client.stop("sixth")
    await client.roll_back("roll back while off", candidate["version"])
    await client.start("seventh", TASKS_OF_TWO)
    await client.group("kept", 0.2, 0.0)
    await client.stop("seventh")


async def _play_episodes(client: Client) -> None:
    await client.episode("first", "task of three", 1.0)
    await client.abort_episode("aborted")
    await client.episode("after abort", "task of three", 0.0)
    await client.let_claim_expire("expired")
    await client.episode("after let_claim_expire", "task of three", 0.0)
    await client.until_task_ended("task of three", 3)
    await client.episode("eval", "eval task", 0.5, kind="eval")
    for number in range(3):
        await client.episode(f"tied {number}", "tied task", 0.5)
    await client.until_task_ended("tied task", 3)
    for number in range(2):  # complete only with the second job, which needs two
        await client.episode(f"of two {number}", "task of two", float(number))


def _tear(run_dir: Path) -> Ack:
    """Cut the last byte off each file of the newest checkpoints."""
    torn = sorted((run_dir / "checkpoints").iterdir())[-NUM_TORN:]
    for file in (file for folder in torn for file in folder.iterdir()):
        file.write_bytes(file.read_bytes()[:-1])
    return {"torn": [folder.name for folder in torn]}


def main(
    run_dir: Path,
    wrong: str | None = None,
    disk: str | None = None,
    clock_s: float = 0.0,
    is_half: bool = False,
    async_steps: int = 0,
) -> None:
    """Run the server and its client in this process, which must be a new one.

    The function patches modules of the server for the rest of the process.

    * `wrong` names one of the wrong orders.
    * `disk` is the kind of a disk failure and its end, such as "full repaired".
    * `clock_s` is the offset of the wall clock.
    * `is_half` ends the script before checkpoints are damaged, since damage would excuse losses.
    * `async_steps` is the setting of the jobs, and the number of groups that the client is ahead.
    """
    if wrong is not None:
        wrong_orders.ALL[wrong]()
    wall_clock = time.time
    time.time = lambda: wall_clock() + clock_s

    def open_backend(*_: object) -> Backend:
        return LineageBackend()

    server_state.open_backend = open_backend
    # Shorter intervals make the tests faster and change no decision.
    step.RETRY_STEP_AFTER_S = loop.SWEEP_EVERY_S = group_commit_writer.RETRY_S = 0.01
    asyncio.run(run_server(run_dir, disk, is_half, async_steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
