"""A load test: a server and several active clients, which are killed at random moments.

The seed decides when which process is killed.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e import active_client
from tests.e2e.active_client import NUM_REPEAT, Notes
from tests.e2e.journal_checks import rows
from tests.e2e.processes import Process, Processes, wait_until


@dataclass(frozen=True, slots=True)
class Load:
    num_clients: int
    at_once: int
    """Simultaneous episodes of all clients together."""
    num_ends: int
    """Acknowledged ends of all clients together."""
    num_kills: int
    idle_limit_s: float
    """Time after which an unused claim expires.

    If a client never received the reply to its claim, a step waits for this time."""
    limit_s: float
    seed: int = 0

    @property
    def job(self) -> str:
        """The job's YAML, with about as many episodes per step as run at once."""
        batch_size = self.at_once // NUM_REPEAT
        return f"job: {{num_repeat: {NUM_REPEAT}, batch_size: {batch_size}, save_freq: 2}}"


class ClientProcess:
    """An active client that can be killed and restarted with the same notes."""

    def __init__(self, url: str, number: int, folder: Path, load: Load) -> None:
        self.notes_file = folder / f"client-{number}.jsonl"
        share = {"at-once": load.at_once, "ends": load.num_ends}
        settings: dict[str, Any] = {
            "url": url,
            "notes": self.notes_file,
            "go": folder / "go",
            **{name: total // load.num_clients for name, total in share.items()},
            "idle-limit-s": load.idle_limit_s,
            "seed": load.seed + number,
            "limit-s": load.limit_s,
        }
        self._command = [sys.executable, active_client.__file__]
        self._command += [f"--{name}={value}" for name, value in settings.items()]
        self._log = folder / f"client-{number}.log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    @property
    def notes(self) -> Notes:
        notes = Notes(self.notes_file)
        notes.read()
        return notes


def play(processes: Processes, load: Load) -> tuple[Path, list[Notes]]:
    """Run the load until every client is done, and stop the server.

    Returns the server's run directory and the clients' notes.
    """
    rng = random.Random(load.seed)
    server = processes.server("--backend", "fake")
    _post(server, "/sync_train_config", {"yaml_as_string": load.job})
    _post(server, "/start_engine", {})
    clients = [
        ClientProcess(server.url, number, processes.folder, load)
        for number in range(load.num_clients)
    ]
    try:
        wait_until(lambda: _num_claimed(server) == load.at_once, load.limit_s, "all to claim")
        (processes.folder / "go").touch()
        moments = sorted(rng.sample(range(load.num_ends * 9 // 10), load.num_kills))
        for number, at in enumerate(moments):
            wait_until(lambda at=at: _num_ended(clients) >= at, load.limit_s, f"{at} ends")
            victim = rng.choice(clients) if number % 2 else server
            victim.kill()
            victim.start()
        wait_until(lambda: _are_done(clients), load.limit_s, "the clients")
    finally:
        for client in clients:
            client.kill()
    server.stop()
    return server.folder, [client.notes for client in clients]


def _are_done(clients: Sequence[ClientProcess]) -> bool:
    codes = [client.returncode for client in clients]
    assert set(codes) <= {None, 0}, codes
    return None not in codes


def _num_ended(clients: Sequence[ClientProcess]) -> int:
    return sum(len(client.notes.ended) for client in clients)


def _num_claimed(server: Process) -> int:
    query = "SELECT COUNT(*) FROM episodes WHERE state = 'claimed'"
    return rows(server.folder, query)[0][0]


def _post(server: Process, path: str, body: dict[str, Any]) -> None:
    assert httpx.post(f"{server.url}{path}", json=body).json()["success"]
