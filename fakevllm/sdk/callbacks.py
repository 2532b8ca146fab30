"""Follows a server's status for those who want to hear of each weight sync."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from statistics import fmean

from rich.console import Console
from rich.table import Table

from fakevllm.sdk.types import SwarmError
from fakevllm_adapters.protocol.pool import PoolInformation
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply

log = logging.getLogger("fakevllm.sdk")

LOOK_EVERY_S = 0.5


class Syncs:
    """Counts the weight syncs that begin, by what a poll sees. Pure.

    A sync that was shorter than the time between two looks is known by the step that grew.
    """

    def __init__(self) -> None:
        self._last: EngineStatusReply | None = None

    def begun(self, seen: EngineStatusReply) -> bool:
        """Whether one has begun since the last look. The first look tells nothing."""
        before, self._last = self._last, seen
        if before is None or before.run_id != seen.run_id:
            return False
        is_syncing = seen.engine_status is EngineStatus.WEIGHT_SYNCING
        was_syncing = before.engine_status is EngineStatus.WEIGHT_SYNCING
        stepped = (seen.global_step or 0) > (before.global_step or 0)
        return (is_syncing and (stepped or not was_syncing)) or (stepped and not was_syncing)


class Watch:
    """The thread around `Syncs`."""

    def __init__(self, status: Callable[[], EngineStatusReply]) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self._status = status
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="weight syncs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _follow(self) -> None:
        syncs = Syncs()
        while not self._stopping.is_set():
            try:
                if syncs.begun(self._status()):
                    self._tell()
            except SwarmError as error:
                log.debug("the server's status is not known: %s", error)
            self._stopping.wait(LOOK_EVERY_S)

    def _tell(self) -> None:
        for callback in tuple(self.callbacks):
            try:
                callback()
            except Exception:  # isolates: one caller's mistake is not the others'
                log.exception("a weight-sync callback failed")


# What a client says of itself in a script that has set up no logging.


def tell_progress() -> None:
    """Its lines go to stderr, unless the script's own logging takes them."""
    logger = logging.getLogger("fakevllm.sdk")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s fakevllm: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)


# The batch that is being collected, for a terminal.

MOST_TASKS = 20


def show_pool(pool: PoolInformation, console: Console | None = None) -> None:
    """Progress, and the newest tasks with their rewards."""
    console = console or Console()
    state = (pool.engine_status or "not known").removeprefix("ENGINE.")
    console.print(
        f"step {pool.global_step or '-'} · {state} · "
        f"tasks {pool.completed_tasks}/{pool.completed_task_target} · "
        f"episodes {pool.completed_episodes}/{pool.completed_episode_target} · "
        f"{len(pool.running_episode_details or {})} running"
    )
    if pool.completed_tasks_rewards:
        console.print(_tasks(pool))


def _tasks(pool: PoolInformation) -> Table:
    table = Table("task", "episodes", "mean reward")
    for task_id, rewards in list(pool.completed_tasks_rewards.items())[-MOST_TASKS:]:
        told = f"{fmean(rewards):.3g}" if rewards else "-"
        table.add_row(task_id, f"{len(rewards)}/{pool.task_expected_num_repeat}", told)
    return table
