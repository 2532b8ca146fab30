"""SIGKILL of each process at each bad moment of a request, with an app that sends it again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ledger_checks import (
    Finding,
    check_file,
    check_states,
    check_trained_once,
    read_rows,
)
from benchmarks.run_log_reader import read_log_entries
from tests.adversary.stack_processes import (
    LIMIT_S,
    engine_pid,
    hook_pid,
    kill,
    num_running,
    send_until_answered,
)
from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import ledger_file
from tests.e2e.processes import Processes, wait_until

pytestmark = pytest.mark.slow

SLOW_REWARD = """
import time
from pathlib import Path

def on_compute_relative_reward(valid_results, all_answers):
    Path({flag!r}).touch()
    time.sleep(0.5)
    return [float((answer["content"] or "").startswith("yes")) for answer in all_answers]
"""


class Moment(StrEnum):
    """A moment of a request at which a process is killed."""

    SAMPLED = "while the engine samples"
    SCORED = "while the hook scores"
    ANSWERED = "right after the answer"


class Victim(StrEnum):
    """A process that is killed."""

    ENGINE = "the engine"
    HOOKS = "the hook process"
    SERVER = "the server"
    PROXY = "the proxy"


KILLS = [
    (Victim.ENGINE, Moment.SAMPLED),
    (Victim.SERVER, Moment.SAMPLED),
    (Victim.PROXY, Moment.SAMPLED),
    (Victim.HOOKS, Moment.SCORED),
    (Victim.ENGINE, Moment.SCORED),
    (Victim.SERVER, Moment.SCORED),
    (Victim.PROXY, Moment.SCORED),
    (Victim.SERVER, Moment.ANSWERED),
    (Victim.PROXY, Moment.ANSWERED),
]


class Stack:
    """A server and a proxy, and the file that the hook creates while it scores."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self.flag = folder / "scoring"
        hooks = write_hooks(folder / "hooks", SLOW_REWARD.format(flag=str(self.flag)))
        config = folder / "fakevllm.toml"
        job = "num_repeat = 2\nbatch_size = 1\nlr = 0.1\nsave_freq = 3\nmax_staleness = 100\n"
        config.write_text(f"[job]\n{job}filter_groups = false\n")
        self.server = processes.server("--backend", "fake")
        arguments = ("--hooks", str(hooks), "--config", str(config))
        self.proxy = processes.proxy(self.server, *arguments)

    def kill(self, victim: Victim) -> None:
        """Kill a process, and start it again if no other process does so."""
        match victim:
            case Victim.ENGINE:
                kill(engine_pid(self.server))
            case Victim.HOOKS:
                kill(hook_pid(self.proxy))
            case Victim.SERVER | Victim.PROXY:
                process = self.server if victim is Victim.SERVER else self.proxy
                process.kill()
                process.start()

    def wait_for(self, moment: Moment) -> None:
        if moment is Moment.SAMPLED:
            wait_until(lambda: num_running(self.server) > 0, LIMIT_S, "a call at the engine")
        elif moment is Moment.SCORED:
            wait_until(self.flag.exists, LIMIT_S, "the hook to score")

    def findings(self) -> list[Finding]:
        """Check ledger and run log."""
        groups = self.groups()
        return [
            check_file(ledger_file(self.proxy)),
            *check_states(groups),
            *check_trained_once(read_log_entries(self.server.folder), groups),
        ]

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of the ledger."""
        return read_rows(ledger_file(self.proxy), "select group_id, state, reason from groups")


def request_body(number: int, moment: Moment) -> dict[str, Any]:
    pace_s = 0.3 if moment is Moment.SAMPLED else 0.0
    text = f"{number}: yes or no? [[slow {pace_s}]]"
    stream = number % 2 == 1
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "stream": stream}


def test_every_request_is_answered_and_no_group_is_lost_or_trained_twice(
    processes: Processes, tmp_path: Path
) -> None:
    stack = Stack(processes, tmp_path)
    with ThreadPoolExecutor() as threads:
        for number, (victim, moment) in enumerate(KILLS):
            stack.proxy.wait_until_healthy()
            stack.flag.unlink(missing_ok=True)
            start = time.monotonic()
            body = request_body(number, moment)
            app = threads.submit(send_until_answered, stack.proxy, body, f"key {number}")
            stack.wait_for(moment)
            if moment is Moment.ANSWERED:
                app.result()
            stack.kill(victim)
            attempts = app.result()
            print(f"{victim} killed {moment}: {attempts} in {time.monotonic() - start:.1f} s")
            assert len(attempts) == 1 or victim is Victim.PROXY, (victim, moment, attempts)
        stack.proxy.wait_until_healthy()

    def wrong() -> list[Finding]:
        return [finding for finding in stack.findings() if finding.holds is False]

    wait_until(lambda: wrong() == [], LIMIT_S, lambda: f"no fault: {wrong()}")
    assert {row["state"] for row in stack.groups()} >= {"trained", "dropped"}
