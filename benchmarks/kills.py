"""Kills of a demo's processes at moments that a seed chose: while they start, while they train, and
while they get over the kill before. Linux, for how processes are found."""

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

LOOK_EVERY_S = 0.02
MAX_DELAY_S = 2.0
"""Of a kill, behind the step it is planned for: it may hit any part of the next steps."""
AMID_SHARE = 0.3
"""Of kills that come while the one before is being got over."""


class Victim(StrEnum):
    SERVER = "server"
    ENGINE = "engine"
    PROXY = "proxy"


_MODULES = {Victim.SERVER: "fakevllm_server\0start", Victim.PROXY: "fakevllm\0serve"}


@dataclass(frozen=True, slots=True)
class Planned:
    victim: Victim
    step: int
    """It comes behind the end of this one, ..."""
    after_s: float
    """... so long behind it, or behind the kill before."""


@dataclass(frozen=True, slots=True)
class Killed:
    victim: Victim
    at: float
    """By time.time()."""


def plan(chance: random.Random, steps: int, each: int) -> list[Planned]:
    """So many of each victim, in any order, none so late that the run would not see its end.

    >>> [str(one.victim) for one in plan(random.Random(0), 100, 1)]
    ['engine', 'proxy', 'server']
    """
    victims = [victim for victim in Victim for _ in range(each)]
    chance.shuffle(victims)
    moments = sorted(chance.randrange(steps) for _ in victims)
    kills: list[Planned] = []
    for victim, step in zip(victims, moments, strict=True):
        if kills and chance.random() < AMID_SHARE:
            step = kills[-1].step
        kills.append(Planned(victim, step, chance.uniform(0.0, MAX_DELAY_S)))
    return kills


def execute(kills: Sequence[Planned], run_dir: Path, is_over: Callable[[], bool]) -> list[Killed]:
    """Returns what was killed: the rest came too late."""
    done: list[Killed] = []
    for kill in kills:
        while last_step(run_dir) < kill.step and not is_over():
            time.sleep(LOOK_EVERY_S)
        time.sleep(kill.after_s)
        pid = _found(kill.victim, run_dir, is_over)
        if pid is None:
            break
        done.append(Killed(kill.victim, time.time()))
        os.kill(pid, signal.SIGKILL)
        while _has_memory(pid):  # or the next kill would be another of the same process
            time.sleep(LOOK_EVERY_S)
    return done


def last_step(run_dir: Path) -> int:
    """The last one that was trained; 0 before there is one."""
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


def _found(victim: Victim, run_dir: Path, is_over: Callable[[], bool]) -> int | None:
    """One that is being started again is waited for."""
    while not is_over():
        for pid in pids(run_dir, _MODULES.get(victim, _MODULES[Victim.SERVER])):
            if victim is not Victim.ENGINE:
                return pid
            for child in children_of(pid):
                return child
        time.sleep(LOOK_EVERY_S)
    return None


def pids(run_dir: Path, module: str) -> Iterator[int]:
    """Of our own processes that work on this run and no other."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes().decode()
            except OSError:
                continue
            if str(run_dir) in command and f"-m\0{module}\0" in command:
                yield int(folder.name)


def _has_memory(pid: int) -> bool:
    """False of one that is gone, or a zombie, which has a parent that wants to know of its end."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Processes that it started itself."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in found.split()]
