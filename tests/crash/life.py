"""One life of a server with its client, from a start to the script's end or to a crash.

    CRASH_AT=plan.after_commit python -m crash.life RUN_DIR

ends with status 137 there; the same without CRASH_AT goes on from where it ended.
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
from crash.engines import FAR, POISON, LedgerBackend
from swarm_server.journal.disks import Disk

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import SiblingRef
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.journal import writer
from fakevllm_server.training import loop, step
from fakevllm_server.types import crash_points
from fakevllm_server.types.backend import Backend, Endpoint
from fakevllm_server.web import state
from fakevllm_server.web.state import ServerState

_JOB = {
    "batch_size": 1,
    "lr": 0.1,
    "save_freq": 2,
    "filter_groups": True,
    "max_staleness": 100,
    "partial_after_s": 1e6,  # the script lets claims run out, and no tasks
}
TASKS_OF_THREE = TrainJob.model_validate({**_JOB, "num_repeat": 3})
TASKS_OF_TWO = TrainJob.model_validate({**_JOB, "num_repeat": 2})
NUM_TORN = 3
"""The newest: the best one is older, and so are the calls that are not kept any more."""
TROUBLE_S, LOOK_S, TROUBLE_LIMIT_S = 0.2, 0.005, 5.0


class LocalSwarm(ServerState):
    """A server whose engine is in this process: nobody connects to it."""

    async def connect(self, endpoint: Endpoint) -> None:
        pass


def open_swarm(run_dir: Path) -> LocalSwarm:
    return LocalSwarm(ServerConfig("fake", run_dir))


async def live(run_dir: Path, disk: str | None, is_half: bool) -> None:
    server = open_swarm(run_dir)
    client = Client(server, run_dir)
    await client.forget_unknown_claims()
    await server.resume()
    async with asyncio.TaskGroup() as beside:
        if disk is not None:
            beside.create_task(_trouble(server, client, *disk.split()))
        await _play_whole_disks(client)
        if not is_half:
            await _play_torn_disks(client, run_dir)
    await server.close()


async def _trouble(server: ServerState, client: Client, kind: str, end: str) -> None:
    """The disk takes nothing for a while, in the middle of the script; `end` is of the server or of
    the trouble."""
    await client.acknowledged("end_group poor-1")
    disk = FullDisk(server.config.run_dir) if kind == "full" else Disk(server.journal)
    disk.refuse()
    async with asyncio.timeout(TROUBLE_LIMIT_S):
        while server.journal.error is None:
            await asyncio.sleep(LOOK_S)
    num_acks = client.num_acks
    await asyncio.sleep(TROUBLE_S)
    assert client.num_acks == num_acks, "acknowledged what the disk does not take"
    assert server.engine.is_serving
    if end == "killed":
        os._exit(crash_points.EXIT_CODE)
    disk.accept()


class FullDisk:
    """The kernel lets no file grow beyond what the write-ahead log has by now; all others are
    smaller."""

    def __init__(self, run_dir: Path) -> None:
        self._log = run_dir / "journal.sqlite-wal"
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def refuse(self) -> None:
        limits = self._log.stat().st_size, self._before[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def accept(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


async def _play_whole_disks(client: Client) -> None:
    await client.start("first", TASKS_OF_THREE)
    served = await client.group("best", 1.0, 0.9)
    await client.group("good", 1.0, 0.9)  # a checkpoint, and the best for good
    await client.group("tied", 0.5, 0.5)
    await client.call(SiblingRef("aborted", 0))
    await client.abort_group("aborted")
    await client.call(SiblingRef("open", 0))
    await client.sample("feedback", served[0][0])
    await _play_episodes(client)
    await client.group(POISON, 1.0, 0.0)
    await client.group("unsaved", 0.2, 0.0)
    await client.stop("first")  # saves, between two checkpoints

    await client.start("second", TASKS_OF_TWO)
    await client.until_task_ended("task of two", 2)
    for number in range(5):
        await client.group(f"poor-{number}", 0.2, 0.0)
    await client.stop("second")


async def _play_torn_disks(client: Client, run_dir: Path) -> None:
    """What was trained from the third step on is lost, and said to be."""
    await client.once("tear", lambda: _tear(run_dir))

    await client.start("third", TASKS_OF_TWO)
    for number in range(3):
        await client.group(f"again-{number}", 0.2, 0.0)
    for number in range(3):
        await client.group(f"{FAR}-{number}", 0.2, 0.0)  # after which training stops
    await client.group("after", 0.2, 0.0)
    await client.stop("third")

    await client.start("fourth", TASKS_OF_TWO)
    await client.group("last", 0.2, 0.0)
    await client.stop("fourth")


async def _play_episodes(client: Client) -> None:
    await client.episode("first", "task of three", 1.0)
    await client.abort_episode("aborted")
    await client.episode("after abort", "task of three", 0.0)
    await client.lapse("lapsed")
    await client.episode("after lapse", "task of three", 0.0)
    await client.until_task_ended("task of three", 3)
    await client.episode("eval", "eval task", 0.5, kind="eval")
    for number in range(3):
        await client.episode(f"tied {number}", "tied task", 0.5)
    await client.until_task_ended("tied task", 3)
    for number in range(2):  # complete once a job is content with two
        await client.episode(f"of two {number}", "task of two", float(number))


def _tear(run_dir: Path) -> Ack:
    """As a disk does that loses the ends of files."""
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
) -> None:
    """In a process of its own: what it changes in the server's modules holds for all of it.
    `wrong`: in which of the wrong orders the server does things. `disk`: what it is, and what comes
    of it. `clock_s`: how far the wall clock has jumped. `is_half`: it ends before checkpoints are
    torn, which would excuse losses."""
    if wrong is not None:
        wrong_orders.ALL[wrong]()
    wall = time.time
    time.time = lambda: wall() + clock_s

    def open_backend(*_: object) -> Backend:
        return LedgerBackend()

    state.open_backend = open_backend
    # How long a test waits, and nothing that is decided.
    step.RETRY_STEP_AFTER_S = loop.SWEEP_EVERY_S = writer.RETRY_S = 0.01
    asyncio.run(live(run_dir, disk, is_half))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
