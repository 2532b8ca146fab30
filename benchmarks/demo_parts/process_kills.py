"""Kills of a demo's processes at moments that a seed decides: while a process starts, while it
trains, and while it recovers from the previous kill. The module needs Linux, because it reads
`/proc`."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

POLL_INTERVAL_S = 0.02
MAX_DELAY_S = 2.0
"""Longest delay of a kill after the end of its planned step, in seconds. Because of the random
delay, a kill may hit any part of the following steps."""
CONSECUTIVE_SHARE = 0.3
"""Share of kills that come while a process still recovers from the previous kill."""


class Victim(StrEnum):
    """A process that may be killed."""

    SERVER = "server"
    ENGINE = "engine"
    PROXY = "proxy"


_MODULES = {Victim.SERVER: "fakevllm_server\0start", Victim.PROXY: "fakevllm\0serve"}


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """A planned kill of a process, with the moment of the kill."""

    victim: Victim
    step: int
    """Number of the training step after which the kill comes."""
    delay_s: float
    """Seconds from the end of this step to the kill. If the previous kill comes after the end of
    this step, the seconds count from the previous kill."""


@dataclass(frozen=True, slots=True)
class CompletedKill:
    """A kill that was carried out."""

    victim: Victim
    at: float
    """Unix time in seconds, from time.time()."""


def plan_kills(chance: random.Random, steps: int, each: int) -> list[PlannedKill]:
    """Return `each` kills of every process in random order, all planned before the last step.

    >>> [str(kill.victim) for kill in plan_kills(random.Random(0), 100, 1)]
    ['engine', 'proxy', 'server']
    """
    victims = [victim for victim in Victim for _ in range(each)]
    chance.shuffle(victims)
    moments = sorted(chance.randrange(steps) for _ in victims)
    kills: list[PlannedKill] = []
    for victim, step in zip(victims, moments, strict=True):
        if kills and chance.random() < CONSECUTIVE_SHARE:
            step = kills[-1].step
        kills.append(PlannedKill(victim, step, chance.uniform(0.0, MAX_DELAY_S)))
    return kills


def execute_kills(
    kills: Sequence[PlannedKill], run_dir: Path, is_over: Callable[[], bool]
) -> list[CompletedKill]:
    """Carry out the kills, and return those that came before the run was over."""
    done: list[CompletedKill] = []
    for kill in kills:
        while last_trained_step(run_dir) < kill.step and not is_over():
            time.sleep(POLL_INTERVAL_S)
        time.sleep(kill.delay_s)
        pid = _wait_for_process(kill.victim, run_dir, is_over)
        if pid is None:
            break
        done.append(CompletedKill(kill.victim, time.time()))
        os.kill(pid, signal.SIGKILL)
        while _has_memory(pid):  # otherwise the next kill might hit the same process again
            time.sleep(POLL_INTERVAL_S)
    return done


def last_trained_step(run_dir: Path) -> int:
    """Return the number of the last trained step, or 0 before the first one."""
    file = run_dir / "journal.sqlite"
    if not file.exists():
        return 0
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as journal:
        try:
            row = journal.execute("select max(step) from batches where state = 'done'").fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return 0
            raise
    return row[0] or 0


def _wait_for_process(victim: Victim, run_dir: Path, is_over: Callable[[], bool]) -> int | None:
    """Return the process id of the victim. If the victim is being restarted, wait for it. Return
    None if the run is over."""
    while not is_over():
        for pid in process_ids(run_dir, _MODULES.get(victim, _MODULES[Victim.SERVER])):
            if victim is not Victim.ENGINE:
                return pid
            for child in child_pids(pid):
                return child
        time.sleep(POLL_INTERVAL_S)
    return None


def process_ids(run_dir: Path, module: str) -> Iterator[int]:
    """Yield the ids of the processes that run `python -m module` on this run directory."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes().decode()
            except OSError:
                continue
            if str(run_dir) in command and f"-m\0{module}\0" in command:
                yield int(folder.name)


def _has_memory(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def child_pids(pid: int) -> list[int]:
    """Return the ids of the direct children of a process. Return [] if the process has ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in children.split()]
