"""The cases of the fault tests: one client sends one question and meets one fault.

All selected cases run in parallel, because clients mostly wait.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.clients.fault_client import Client, Outcome, outcome_of
from tests.clients.faulty_swarm import FaultySwarm, Script
from tests.clients.library_clients import LIBRARIES, WITH_TOOLS
from tests.clients.program_clients import PROGRAMS
from tests.e2e.ledgers import rows
from tests.e2e.processes import Process, wait_until

CLIENTS: dict[str, Client] = LIBRARIES | PROGRAMS
"""The clients that are tested with every fault."""
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
    """Number of requests that fail; later requests are answered."""
    failing_siblings: int | None = None
    """Number of siblings of each request that fail, the lead first."""
    is_away: bool = False
    """Whether the server is gone."""

    def __str__(self) -> str:
        fault = "away" if self.is_away else self.fault
        over = "" if self.failing is None else f" {self.failing} times"
        return f"{self.client}: {fault}{over}, N={self.num_siblings}"

    @property
    def streamed(self) -> bool:
        return CLIENTS[self.client].streamed


@dataclass(frozen=True, slots=True)
class CaseResult:
    case: Case
    outcome: Outcome
    pauses: list[float]
    """Seconds between the client's requests."""
    rows: list[Any]
    """The ledger's rows, one per request: state, status, latency and served text."""


@dataclass(frozen=True, slots=True)
class Setup:
    swarm: FaultySwarm
    proxies: dict[int, Process]
    """Proxies by their number of siblings."""
    proxies_without_server: dict[int, Process]
    """Proxies whose server is gone, by their number of siblings."""
    proxy_without_429s: Process
    """A proxy with four siblings that gets no 429s from other cases.

    After 429s, a proxy lowers its limit of siblings."""
    folder: Path

    def run(self, case: Case, number: int) -> CaseResult:
        """Run a case, and check that the ledger has one row per request."""
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
        proxy = (self.proxies_without_server if case.is_away else self.proxies)[case.num_siblings]
        if case.failing_siblings is not None:
            proxy = self.proxy_without_429s
        try:
            outcome = client.send(proxy.url, f"{script.mark} please", own)
        except AssertionError:
            raise
        except Exception as error:  # the app may see any exception
            outcome = outcome_of(error)

        def recorded() -> list[Any]:
            return rows(proxy, _ROWS, script.mark)

        num_requests = 1 if case.is_away else len(script.requests)
        wait_until(
            lambda: len(recorded()) >= num_requests,
            SETTLE_TIMEOUT_S,
            lambda: f"{num_requests} rows of {case}",
        )
        assert case.is_away or len(recorded()) == num_requests, "one row for each request"
        pauses = [after - before for before, after in pairwise(script.requests.values())]
        return CaseResult(case, outcome, pauses, recorded())


class CaseRuns:
    def __init__(self, stage: Setup, cases: Iterable[Case], threads: Executor) -> None:
        for name in _IN_PROCESS:  # import before the threads start, not in several threads at once
            importlib.import_module(name)
        self._futures: dict[Case, Future[CaseResult]] = {
            case: threads.submit(stage.run, case, number)
            for number, case in enumerate(sorted(cases, key=_longest_first))
        }

    def __getitem__(self, case: Case) -> CaseResult:
        return self._futures[case].result(RUN_TIMEOUT_S)


def _longest_first(case: Case) -> bool:
    return case.client != "opencode" and "silent" not in case.fault
