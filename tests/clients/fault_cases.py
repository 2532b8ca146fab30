"""One client with one question that meets one fault, and what came of it. All chosen cases run at
once: clients mostly wait, for the server or in pauses of their own."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.clients.asking import Client, Told, failed
from tests.clients.asking_libraries import LIBRARIES, WITH_TOOLS
from tests.clients.asking_programs import PROGRAMS
from tests.clients.faulty_swarm import FaultySwarm, Script
from tests.e2e.ledgers import rows
from tests.e2e.processes import Process, wait_until

CLIENTS: dict[str, Client] = LIBRARIES | PROGRAMS
"""All that meet every fault."""
NUM_SIBLINGS = (1, 4)
RUN_TIMEOUT_S = 480.0
SETTLE_TIMEOUT_S = 60.0
_ROWS = """
select g.state, g.status, g.latency_s, s.text from groups g
left join siblings s on s.group_id = g.group_id and s.served
where instr(g.request_json, ?) order by g.received_at
"""
_IN_PROCESS = ("anthropic", "langchain_openai", "agents", "pydantic_ai.models.openai")


@dataclass(frozen=True, slots=True)
class Case:
    client: str
    fault: str
    num_siblings: int
    failing: int | None = None
    """So many requests; those behind them are answered."""
    failing_siblings: int | None = None
    is_away: bool = False
    """There is no server."""

    def __str__(self) -> str:
        fault = "away" if self.is_away else self.fault
        over = "" if self.failing is None else f" {self.failing} times"
        return f"{self.client}: {fault}{over}, N={self.num_siblings}"

    @property
    def streamed(self) -> bool:
        return CLIENTS[self.client].streamed


@dataclass(frozen=True, slots=True)
class Ran:
    case: Case
    told: Told
    pauses: list[float]
    """Between its requests, in seconds."""
    rows: list[Any]
    """Of the ledger, one a request: state, status, latency and the text that was served."""


@dataclass(frozen=True, slots=True)
class Stage:
    swarm: FaultySwarm
    proxies: dict[int, Process]
    """By their number of siblings."""
    lonely: dict[int, Process]
    """Whose server is gone."""
    spared: Process
    """With four siblings, and nobody's 429s, by which a proxy learns to ask for fewer."""
    folder: Path

    def run(self, case: Case, number: int) -> Ran:
        """Raises AssertionError where the ledger has not one row for each request."""
        own = self.folder / f"case{number}"
        own.mkdir()
        client = (CLIENTS | WITH_TOOLS)[case.client]
        script = Script(
            f"case-{number}-",
            case.fault,
            1.5 * client.limit_s,
            case.failing,
            case.failing_siblings,
        )
        self.swarm.expect(script)
        proxy = (self.lonely if case.is_away else self.proxies)[case.num_siblings]
        if case.failing_siblings is not None:
            proxy = self.spared
        try:
            told = client.ask(proxy.url, f"{script.mark} please", own)
        except AssertionError:
            raise
        except Exception as error:  # any is one that the app sees
            told = failed(error)

        def kept() -> list[Any]:
            return rows(proxy, _ROWS, script.mark)

        seen = 1 if case.is_away else len(script.requests)
        wait_until(lambda: len(kept()) >= seen, SETTLE_TIMEOUT_S, lambda: f"{seen} rows of {case}")
        assert case.is_away or len(kept()) == seen, "one row for each request"
        pauses = [after - before for before, after in pairwise(script.requests.values())]
        return Ran(case, told, pauses, kept())


class Runs:
    def __init__(self, stage: Stage, cases: Iterable[Case], threads: Executor) -> None:
        for name in _IN_PROCESS:  # not in many threads at once
            importlib.import_module(name)
        self._futures: dict[Case, Future[Ran]] = {
            case: threads.submit(stage.run, case, number)
            for number, case in enumerate(sorted(cases, key=_longest_first))
        }

    def __getitem__(self, case: Case) -> Ran:
        return self._futures[case].result(RUN_TIMEOUT_S)


def _longest_first(case: Case) -> bool:
    return case.client != "opencode" and "silent" not in case.fault
