"""Measure what open consoles cost the requests of apps.

    python -m benchmarks.console_load [--groups 100000] [--consoles 10] [--rounds 5] [--write]

In each round, the same requests are sent to a proxy three times: with nothing beside it, while
browsers have pages of one `fakevllm console` open (`benchmarks.console_browsers`), and beside a
program that does nothing but use as much CPU time as the console and its browsers
(`benchmarks.busy_program`). The proxy's ledger has many groups from the beginning. CPU time is that
of the process, from the clock that Linux keeps for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import aiohttp
import httpx
import uvloop

from benchmarks import busy_program, console_browsers
from benchmarks.console_browsers import settings_line
from benchmarks.ledger_questions import GROUPS_PER_STEP, RUN_ID, make_ledger
from benchmarks.proxy_parts.latency import percentiles
from benchmarks.proxy_parts.load import Prompts, send
from benchmarks.proxy_parts.process_cpu import cpu_seconds
from benchmarks.proxy_parts.targets import Target, ledger_file, start_proxy
from benchmarks.results import ROOT, conditions, markdown_table, print_table, replace_section
from tests.e2e.console_process import login_url, start_console
from tests.e2e.processes import Process, Processes

TITLE = "console_load"
NUM_SIBLINGS = 4
AT_ONCE = (1, 8)
"""Numbers of requests at a time. With 8, a small machine has no idle core."""
BODY_BYTES = 1000
NUM_WARM_UP = 500
LATENCY_GOAL = 1.1
CPU_GOAL = 1.05
BROWSERS_TIMEOUT_S = 60.0
"""Maximum seconds until the browsers have ended."""
HEADER = (
    "requests at a time",
    "beside the proxy",
    "p50 ms",
    "p99 ms",
    "requests/s",
    "proxy's CPU ms/request",
    "CPU beside it, share of a core",
)


class Beside(StrEnum):
    """What runs beside the proxy, its server, and the client that measures."""

    NOTHING = "nothing"
    CONSOLES = "consoles"
    PROGRAM = "another program"


ORDERS = (
    (Beside.NOTHING, Beside.CONSOLES, Beside.PROGRAM),
    (Beside.CONSOLES, Beside.PROGRAM, Beside.NOTHING),
    (Beside.PROGRAM, Beside.NOTHING, Beside.CONSOLES),
)
"""The orders of successive rounds. The ledger grows with each measurement, so each kind of
measurement is first in turn. The program follows consoles, whose share of a core it uses."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the requests of one round took."""

    p50_s: float
    p99_s: float
    requests_per_s: float
    proxy_cpu_s: float
    """CPU seconds of the proxy and its hook process for one request."""
    cpu_share_beside: float
    """CPU seconds of what runs beside the proxy for each second."""


@dataclass(slots=True)
class Figures:
    """The samples of all rounds."""

    rounds: dict[tuple[int, Beside], list[Sample]] = field(
        default_factory=dict[tuple[int, Beside], list[Sample]]
    )
    """Maps (number of requests at a time, what runs beside the proxy) to one sample of each
    round."""
    load_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Seconds of the loads of each page of the console."""

    def median(self, at_once: int, beside: Beside, value: Callable[[Sample], float]) -> float:
        """Return the median of a value over the rounds."""
        return statistics.median(map(value, self.rounds[at_once, beside]))

    def ratio(
        self,
        at_once: int,
        beside: Beside,
        value: Callable[[Sample], float],
        floor: Beside = Beside.NOTHING,
    ) -> float:
        """Return the value divided by that beside `floor`, as the median over the rounds."""
        pairs = zip(self.rounds[at_once, beside], self.rounds[at_once, floor], strict=True)
        return statistics.median(value(sample) / value(least) for sample, least in pairs)


@dataclass(slots=True)
class Measurement:
    """The processes under test, and how they are measured."""

    target: Target
    console: Process
    cookies: dict[str, str]
    num_consoles: int
    num_requests: int
    prompts: Prompts = field(default_factory=Prompts)
    figures: Figures = field(default_factory=Figures)

    async def run(self, num_rounds: int) -> None:
        """Measure all rounds, and check that the ledger has each request."""
        connector = aiohttp.TCPConnector(limit=max(AT_ONCE), keepalive_timeout=30)
        async with aiohttp.ClientSession(connector=connector) as http:
            await self._send(http, NUM_WARM_UP, max(AT_ONCE))
            for index in range(num_rounds):
                for beside in ORDERS[index % len(ORDERS)]:
                    await self._measure(http, beside)
        self.target.check_ledger()

    async def _measure(self, http: aiohttp.ClientSession, beside: Beside) -> None:
        with self._running(beside) as pids:
            for at_once in AT_ONCE:
                sample = await self._sample(http, at_once, pids)
                self.figures.rounds.setdefault((at_once, beside), []).append(sample)

    @contextmanager
    def _running(self, beside: Beside) -> Generator[Sequence[int]]:
        """Run it during the `with` block, and yield the ids of its processes."""
        if beside is Beside.CONSOLES:
            with self._browsers() as browsers:
                yield (self.console.pid, browsers.pid)
        elif beside is Beside.PROGRAM:
            with self._busy_program() as program:
                yield (program.pid,)
        else:
            yield ()

    async def _sample(
        self, http: aiohttp.ClientSession, at_once: int, pids_beside: Sequence[int]
    ) -> Sample:
        before = self.target.wait_until_resting()
        beside_before, started_at = sum(map(cpu_seconds, pids_beside)), time.monotonic()
        latencies = await self._send(http, self.num_requests, at_once)
        seconds = time.monotonic() - started_at
        beside_s = sum(map(cpu_seconds, pids_beside)) - beside_before
        spent = self.target.wait_until_resting() - before
        p50_s, p99_s = percentiles(latencies)
        return Sample(
            p50_s,
            p99_s,
            self.num_requests / seconds,
            (spent.proxy + spent.hook) / self.num_requests,
            beside_s / seconds,
        )

    async def _send(self, http: aiohttp.ClientSession, num: int, at_once: int) -> list[float]:
        bodies = self.prompts.bodies(num, BODY_BYTES, streamed=False)
        timings = await send(http, self.target.process.url, bodies, at_once)
        self.target.num_sent += num
        return [timing.latency_s for timing in timings]

    @contextmanager
    def _browsers(self) -> Generator[subprocess.Popen[str]]:
        """Keep the consoles open during the `with` block. Raises AssertionError if a page could not
        be loaded."""
        settings = console_browsers.Settings(
            self.console.url, self.cookies, self.num_consoles, RUN_ID
        )
        command = [sys.executable, "-m", console_browsers.__name__]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as browsers:
            assert browsers.stdin is not None and browsers.stdout is not None
            browsers.stdin.write(settings_line(settings))
            browsers.stdin.flush()
            assert browsers.stdout.readline() == "open\n", "the pages could not be loaded"
            yield browsers
            line, _ = browsers.communicate(timeout=BROWSERS_TIMEOUT_S)
            assert browsers.returncode == 0, "the pages could not be loaded again"
        for page, load_s in json.loads(line).items():
            self.figures.load_s.setdefault(page, []).extend(load_s)

    @contextmanager
    def _busy_program(self) -> Generator[subprocess.Popen[bytes]]:
        """Use, during the `with` block, the share of a core that consoles used in the rounds
        before."""
        shares = [
            self.figures.median(at_once, Beside.CONSOLES, lambda sample: sample.cpu_share_beside)
            for at_once in AT_ONCE
        ]
        share = statistics.mean(shares)
        command = [sys.executable, "-m", busy_program.__name__, str(share)]
        with subprocess.Popen(command, cwd=ROOT) as program:
            try:
                yield program
            finally:
                program.kill()


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse_arguments(arguments)
    text = conditions()
    started_at = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        Processes(Path(folder), shows_logs=False) as started,
    ):
        measurement = _start(started, args)
        uvloop.run(measurement.run(args.rounds))
    figures = measurement.figures
    rows = table_rows(figures)
    print_table(HEADER, rows)
    page_header, page_rows = ("page", "loads", "median ms"), load_rows(figures.load_s)
    print_table(page_header, page_rows)
    goals, are_reached = check_goals(figures)
    summary = (
        f"Medians of {args.rounds} rounds with {args.requests} requests each, on a ledger that had "
        f"{args.groups:,} groups at the start. {args.consoles} consoles are open. The other "
        "program uses as much CPU time as consoles and browsers. A ratio is the median of the "
        "rounds' ratios to the measurement with nothing beside the proxy. The proxy has "
        f"{NUM_SIBLINGS} siblings and a hook. {goals}"
    )
    print(f"{summary}\nThe run took {time.monotonic() - started_at:.0f} s.")
    if args.write:
        tables = markdown_table(HEADER, rows), markdown_table(page_header, page_rows)
        replace_section(TITLE, f"{text}\n{tables[0]}\n{tables[1]}\n{summary}")
    if not are_reached:
        sys.exit(1)


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, default=100_000, help="groups in the ledger")
    parser.add_argument("--consoles", type=int, default=10, help="pages that are open")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1500, help="requests of each measurement")
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    return parser.parse_args(arguments)


def _start(started: Processes, args: argparse.Namespace) -> Measurement:
    file = ledger_file(started, NUM_SIBLINGS, has_hook=True)
    file.parent.mkdir(parents=True)
    make_ledger(file, args.groups)
    target = start_proxy(started, NUM_SIBLINGS, has_hook=True, groups_per_step=GROUPS_PER_STEP)
    target.num_sent = args.groups
    console = start_console(started, target.process)
    with httpx.Client() as http:
        http.get(login_url(console)).raise_for_status()
        cookies = dict(http.cookies)
    return Measurement(target, console, cookies, args.consoles, args.requests)


def table_rows(figures: Figures) -> list[tuple[str, ...]]:
    """Return the rows of the table, and the ratios to the measurement with nothing beside the
    proxy."""
    rows: list[tuple[str, ...]] = []
    values = _values()
    for at_once in AT_ONCE:
        for beside in Beside:
            cells = [
                f"{factor * figures.median(at_once, beside, value):.2f}" for factor, value in values
            ]
            rows.append((str(at_once), beside, *cells))
        for beside in (Beside.CONSOLES, Beside.PROGRAM):
            ratios = [f"{figures.ratio(at_once, beside, value):.3f}" for _, value in values[:-1]]
            rows.append((str(at_once), f"{beside}: ratio", *ratios, ""))
    return rows


def _values() -> Sequence[tuple[float, Callable[[Sample], float]]]:
    """Return the factor and the value of each column after the first two."""
    return (
        (1000, lambda sample: sample.p50_s),
        (1000, lambda sample: sample.p99_s),
        (1, lambda sample: sample.requests_per_s),
        (1000, lambda sample: sample.proxy_cpu_s),
        (1, lambda sample: sample.cpu_share_beside),
    )


def load_rows(load_s: Mapping[str, Sequence[float]]) -> list[tuple[str, ...]]:
    """Return how often each page was loaded, and the median of the times."""
    return [
        (page, str(len(values)), f"{1000 * statistics.median(values):.0f}")
        for page, values in load_s.items()
    ]


def check_goals(figures: Figures) -> tuple[str, bool]:
    """Return a sentence for each goal, and True if all are reached.

    The latency has a goal only for requests that are sent one at a time. With more of them, no core
    is idle on a small machine. The latency is then mostly the time in queues, and any process that
    runs displaces the proxy from its core and its caches. The CPU time is therefore compared with
    that beside a program that does nothing but use the same share of a core.
    """
    one, many = AT_ONCE

    def cpu_s(sample: Sample) -> float:
        return sample.proxy_cpu_s

    consoles = Beside.CONSOLES
    p50 = figures.ratio(one, consoles, lambda sample: sample.p50_s)
    alone = figures.ratio(one, consoles, cpu_s)
    busy = figures.ratio(many, consoles, cpu_s, floor=Beside.PROGRAM)
    sentences = [
        _goal("p50 of requests that are sent one at a time", p50, LATENCY_GOAL),
        _goal(f"the proxy's CPU time, {one} at a time", alone, CPU_GOAL),
        _goal(f"the proxy's CPU time, {many} at a time, beside the program's", busy, CPU_GOAL),
    ]
    are_reached = p50 <= LATENCY_GOAL and max(alone, busy) <= CPU_GOAL
    return "Ratios: " + "; ".join(sentences) + ".", are_reached


def _goal(name: str, ratio: float, goal: float) -> str:
    word = "reached" if ratio <= goal else "missed"
    return f"{name}, {ratio:.3f} (goal: at most {goal:g}, {word})"


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        sys.exit("benchmarks.console_load reads the clocks of processes, so it needs Linux.")
    main()
