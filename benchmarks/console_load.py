"""Measure what open consoles cost the requests of apps.

    python -m benchmarks.console_load [--groups 100000] [--consoles 10] [--rounds 5] [--write]

In each round, the same requests are sent to a proxy twice: without consoles, and while browsers
have pages of one `fakevllm console` open (`benchmarks.console_browsers`). Every second round begins
with the consoles. The proxy's ledger has
many groups from the beginning. CPU time is that of the process, from the clock that Linux keeps for
it.
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
from pathlib import Path

import aiohttp
import httpx
import uvloop

from benchmarks import console_browsers
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
    "consoles",
    "p50 ms",
    "p99 ms",
    "requests/s",
    "proxy's CPU ms/request",
    "console's CPU, share of a core",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the requests of one round took."""

    p50_s: float
    p99_s: float
    requests_per_s: float
    proxy_cpu_s: float
    """CPU seconds of the proxy and its hook process for one request."""
    console_cpu_share: float
    """CPU seconds of the console for each second."""


@dataclass(slots=True)
class Figures:
    """The samples of all rounds."""

    rounds: dict[tuple[int, int], list[Sample]] = field(
        default_factory=dict[tuple[int, int], list[Sample]]
    )
    """Maps (number of requests at a time, number of consoles) to one sample of each round."""
    load_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Seconds of the loads of each page of the console."""

    def median(self, at_once: int, num_consoles: int, value: Callable[[Sample], float]) -> float:
        """Return the median of a value over the rounds."""
        return statistics.median(map(value, self.rounds[at_once, num_consoles]))

    def ratio(self, at_once: int, num_consoles: int, value: Callable[[Sample], float]) -> float:
        """Return the value with consoles divided by that without, as the median over the rounds."""
        pairs = zip(self.rounds[at_once, num_consoles], self.rounds[at_once, 0], strict=True)
        return statistics.median(value(with_) / value(without) for with_, without in pairs)


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
                # The ledger grows with each measurement, so each of the two is first in turn.
                is_first = index % 2 == 0
                if is_first:
                    await self._measure(http, 0)
                with self._browsers():
                    await self._measure(http, self.num_consoles)
                if not is_first:
                    await self._measure(http, 0)
        self.target.check_ledger()

    async def _measure(self, http: aiohttp.ClientSession, num_consoles: int) -> None:
        for at_once in AT_ONCE:
            sample = await self._sample(http, at_once)
            self.figures.rounds.setdefault((at_once, num_consoles), []).append(sample)

    async def _sample(self, http: aiohttp.ClientSession, at_once: int) -> Sample:
        before = self.target.wait_until_resting()
        console_before, started_at = cpu_seconds(self.console.pid), time.monotonic()
        latencies = await self._send(http, self.num_requests, at_once)
        seconds = time.monotonic() - started_at
        console_s = cpu_seconds(self.console.pid) - console_before
        spent = self.target.wait_until_resting() - before
        p50_s, p99_s = percentiles(latencies)
        return Sample(
            p50_s,
            p99_s,
            self.num_requests / seconds,
            (spent.proxy + spent.hook) / self.num_requests,
            console_s / seconds,
        )

    async def _send(self, http: aiohttp.ClientSession, num: int, at_once: int) -> list[float]:
        bodies = self.prompts.bodies(num, BODY_BYTES, streamed=False)
        timings = await send(http, self.target.process.url, bodies, at_once)
        self.target.num_sent += num
        return [timing.latency_s for timing in timings]

    @contextmanager
    def _browsers(self) -> Generator[None]:
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
            yield
            line, _ = browsers.communicate(timeout=BROWSERS_TIMEOUT_S)
            assert browsers.returncode == 0, "the pages could not be loaded again"
        for page, load_s in json.loads(line).items():
            self.figures.load_s.setdefault(page, []).extend(load_s)


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
    rows = table_rows(figures, args.consoles)
    print_table(HEADER, rows)
    page_header, page_rows = ("page", "loads", "median ms"), load_rows(figures.load_s)
    print_table(page_header, page_rows)
    goals, are_reached = check_goals(figures, args.consoles)
    summary = (
        f"Medians of {args.rounds} rounds with {args.requests} requests each, on a ledger that had "
        f"{args.groups:,} groups at the start. A ratio is the median of the rounds' ratios. The "
        f"proxy has {NUM_SIBLINGS} siblings and a hook. {goals}"
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


def table_rows(figures: Figures, num_consoles: int) -> list[tuple[str, ...]]:
    """Return the rows of the table, without and with consoles, and their ratios."""
    rows: list[tuple[str, ...]] = []
    values = _values()
    for at_once in AT_ONCE:
        for num in (0, num_consoles):
            cells = [
                f"{factor * figures.median(at_once, num, value):.2f}" for factor, value in values
            ]
            rows.append((str(at_once), str(num), *cells))
        ratios = [f"{figures.ratio(at_once, num_consoles, value):.3f}" for _, value in values[:-1]]
        rows.append((str(at_once), "ratio", *ratios, ""))
    return rows


def _values() -> Sequence[tuple[float, Callable[[Sample], float]]]:
    """Return the factor and the value of each column after the first two."""
    return (
        (1000, lambda sample: sample.p50_s),
        (1000, lambda sample: sample.p99_s),
        (1, lambda sample: sample.requests_per_s),
        (1000, lambda sample: sample.proxy_cpu_s),
        (1, lambda sample: sample.console_cpu_share),
    )


def load_rows(load_s: Mapping[str, Sequence[float]]) -> list[tuple[str, ...]]:
    """Return how often each page was loaded, and the median of the times."""
    return [
        (page, str(len(values)), f"{1000 * statistics.median(values):.0f}")
        for page, values in load_s.items()
    ]


def check_goals(figures: Figures, num_consoles: int) -> tuple[str, bool]:
    """Return a sentence for each goal, and True if all are reached.

    The latency has a goal only for requests that are sent one at a time. With more of them, no core
    is idle on a small machine. The latency is then mostly the time in queues, which becomes longer
    with every process that does something.
    """
    p50 = figures.ratio(AT_ONCE[0], num_consoles, lambda sample: sample.p50_s)
    sentences = [_goal("p50 of requests that are sent one at a time", p50, LATENCY_GOAL)]
    are_reached = p50 <= LATENCY_GOAL
    for at_once in AT_ONCE:
        cpu = figures.ratio(at_once, num_consoles, lambda sample: sample.proxy_cpu_s)
        sentences.append(_goal(f"the proxy's CPU time, {at_once} at a time", cpu, CPU_GOAL))
        are_reached = are_reached and cpu <= CPU_GOAL
    return "Ratios: " + "; ".join(sentences) + ".", are_reached


def _goal(name: str, ratio: float, goal: float) -> str:
    word = "reached" if ratio <= goal else "missed"
    return f"{name}, {ratio:.3f} (goal: at most {goal:g}, {word})"


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        sys.exit("benchmarks.console_load reads the clocks of processes, so it needs Linux.")
    main()
