"""Measure CPU time per answer (proxy, hook process, server and engine) and latency.

    python -m benchmarks.proxy_overhead [--quick] [--siblings 1,8] [--sizes 1KB,100KB]
        [--rounds 5] [--litellm] [--write]

For each number of siblings N, there is a proxy with its own server and its own fake engine. In
addition, there is one proxy with N = 1 that has no hook; all other proxies have a hook process. A
bare relay in front of the server of the proxy without a hook is the floor: its time is that of one
hop of a prompt and its answer. The targets take turns in each round, so that all run under the same
conditions, and every figure is a median over the rounds. The CPU time of a request includes the
work after the answer: ledger, rewards, journal. The benchmark needs Linux.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.proxy_parts.cpu_grid import CONCURRENCY, SIZES, Cell, Grid, Plan, measure_grid
from benchmarks.proxy_parts.latency import Alone, measure_alone, measure_tail, percentiles
from benchmarks.proxy_parts.targets import (
    RELAY,
    Cpu,
    Target,
    start_litellm,
    start_proxy,
    start_relay,
    target_name,
)
from benchmarks.results import conditions, markdown_table, replace_section
from tests.e2e.processes import Processes

TITLE = "proxy_overhead"
SIBLINGS = (1, 4, 8, 16)
QUICK_SIBLINGS = (8,)
TAIL_SIBLINGS = 8
PLAIN = target_name(1, has_hook=False)
"""Name of the proxy without siblings and without a hook."""
NUM_STARTS_AT_ONCE = 3
NUM_ALONE = 300
"""Requests of each target and kind of answer in each round of latencies."""
IDLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the benchmark: which figures to measure."""

    siblings: Sequence[int] = SIBLINGS
    plan: Plan = field(default_factory=Plan)
    num_alone: int = NUM_ALONE
    """Number of requests for each target and each kind of answer in each round of latencies. 0
    means that no latencies are measured."""
    with_litellm: bool = False


QUICK = Settings(QUICK_SIBLINGS, Plan(("1 KB", "100 KB"), 3, 0.2), 40)


@dataclass(slots=True)
class Figures:
    """Everything that was measured."""

    settings: Settings
    targets: list[Target]
    grid: Grid
    idle: Cpu = field(default_factory=Cpu)
    """CPU seconds per second of wall time without requests, for the proxy without siblings and its
    server."""
    alone: Alone = field(default_factory=Alone)
    tails: dict[bool, list[float]] = field(default_factory=dict[bool, list[float]])
    """Seconds from the last byte of the last sibling to the first byte that the app gets. The keys
    say whether the answers are streamed."""

    def x_relay(self, *, streamed: bool, size: str = "1 KB") -> float:
        """Return the CPU time of the proxy without siblings, divided by the CPU time of a bare
        relay."""
        return self.grid.ratio(
            Cell(PLAIN, size, streamed), "proxy", Cell(RELAY, size, streamed), "relay"
        )

    def x_single(self, num_siblings: int, *, size: str, streamed: bool) -> float:
        """Return the CPU time of proxy, hook process and server with siblings, divided by the CPU
        time of the proxy without siblings and its server."""
        return self.grid.ratio(
            Cell(target_name(num_siblings, has_hook=True), size, streamed),
            "ours",
            Cell(PLAIN, size, streamed),
            "ours",
        )


def num_hops(num_siblings: int) -> int:
    """Return the minimum number of hops of a group, in units of a bare relay.

    The prompt passes through the proxy and the server once for the lead (the first sibling), and
    once more for all other siblings together.
    """
    return 2 * min(num_siblings, 2)


def measure(settings: Settings) -> Figures:
    """Start all processes, take all measurements, and check the ledgers."""
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as started:
        return uvloop.run(_measure(settings, _start(started, settings)))


def _start(started: Processes, settings: Settings) -> list[Target]:
    """Start the relay, the proxy without siblings, and all others, in this order."""
    with ThreadPoolExecutor(NUM_STARTS_AT_ONCE) as pool:
        plain = pool.submit(start_proxy, started, 1, has_hook=False)
        others = [
            pool.submit(
                start_proxy, started, num, has_hook=True, has_byte_clock=num == TAIL_SIBLINGS
            )
            for num in settings.siblings
        ]
        targets = [plain.result(), *(other.result() for other in others)]
    server = targets[0].server
    targets.insert(0, start_relay(started, server))
    if settings.with_litellm:
        targets.append(start_litellm(started, server))
    return targets


async def _measure(settings: Settings, targets: list[Target]) -> Figures:
    relay, plain = targets[:2]
    connector = aiohttp.TCPConnector(limit=CONCURRENCY, keepalive_timeout=30)
    async with aiohttp.ClientSession(connector=connector) as http:
        grid = await measure_grid(http, targets, settings.plan)
        figures = Figures(settings, targets, grid)
        figures.idle = _measure_idle(plain)
        if settings.num_alone:
            server = Target("server", plain.server, plain.server)
            figures.alone = await measure_alone(
                http, [server, relay, plain], settings.num_alone, settings.plan.num_rounds
            )
        clocked = next((target for target in targets if target.byte_clock is not None), None)
        if settings.num_alone and clocked is not None:
            for streamed in (False, True):
                num = settings.num_alone
                await measure_tail(http, clocked, num // 10, streamed=streamed)  # warm-up
                figures.tails[streamed] = await measure_tail(http, clocked, num, streamed=streamed)
    for target in targets:
        if target.is_proxy:
            target.check_ledger()
    return figures


def _measure_idle(target: Target) -> Cpu:
    before, started = target.wait_until_resting(), time.monotonic()
    time.sleep(IDLE_S)
    return (target.cpu() - before) / (time.monotonic() - started)


def main() -> None:
    args = _parse_arguments()
    text = conditions()
    settings = _settings(args)
    figures = measure(settings)
    sections = [cpu_table(figures), *latency_tables(figures)]
    console = Console(width=150)
    for title, header, rows in sections:
        table = Table(*header, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(summary(figures))
    if args.write:
        tables = [f"{title}:\n\n{markdown_table(header, rows)}" for title, header, rows in sections]
        replace_section(TITLE, "\n".join([text, *tables, summary(figures)]))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="N=1 and 8, 1 and 100 KB, 3 rounds")
    parser.add_argument("--siblings", type=_numbers, help="numbers of siblings, such as 1,8")
    parser.add_argument("--sizes", type=_sizes, help="sizes of prompts, such as 1KB,100KB")
    parser.add_argument("--rounds", type=int, help="rounds of each measurement")
    parser.add_argument("--no-latency", action="store_true", help="measure only CPU time")
    parser.add_argument("--litellm", action="store_true", help="measure LiteLLM's proxy too")
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    return parser.parse_args()


def _settings(args: argparse.Namespace) -> Settings:
    base = QUICK if args.quick else Settings()
    plan = Plan(
        args.sizes or base.plan.sizes, args.rounds or base.plan.num_rounds, base.plan.round_s
    )
    num_alone = 0 if args.no_latency else base.num_alone
    return Settings(args.siblings or base.siblings, plan, num_alone, args.litellm)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _sizes(text: str) -> tuple[str, ...]:
    by_short_name = {name.replace(" ", ""): name for name in SIZES}
    return tuple(by_short_name[size] for size in text.split(","))


Section = tuple[str, list[str], list[list[str]]]
"""Title, header and rows of a table."""


def cpu_table(figures: Figures) -> Section:
    """Return the table of CPU milliseconds per request."""
    header = ["prompt", "answer", "through", "relay", "proxy", "hook", "server", "engine"]
    header += ["p+h+s", "proxy x relay", "p+h+s x floor", "p+h+s x N=1"]
    rows: list[list[str]] = []
    for size in figures.settings.plan.sizes:
        for streamed in (False, True):
            rows += [_cpu_row(figures, target, size, streamed) for target in figures.targets]
    return "CPU milliseconds per request, by process", header, rows


def _cpu_row(figures: Figures, target: Target, size: str, streamed: bool) -> list[str]:
    grid, cell = figures.grid, Cell(target.name, size, streamed)
    relay, plain = Cell(RELAY, size, streamed), Cell(PLAIN, size, streamed)

    def ms(process: str, is_shown: bool = True) -> str:
        return f"{1000 * grid.median_s(cell, process):.2f}" if is_shown else ""

    is_proxy = target.is_proxy
    row = [size, "streamed" if streamed else "whole", target.name, ms("relay", not is_proxy)]
    row += [ms("proxy", is_proxy), ms("hook", target.has_hook), ms("server"), ms("engine")]
    if not is_proxy:
        x_relay = grid.ratio(cell, "relay", relay, "relay")
        return [*row, "", f"{x_relay:.2f}", "", ""]
    hops = num_hops(target.num_siblings)
    row += [ms("ours"), f"{grid.ratio(cell, 'proxy', relay, 'relay'):.2f}"]
    return [
        *row,
        f"{grid.ratio(cell, 'ours', relay, 'relay') / hops:.2f}",
        f"{grid.ratio(cell, 'ours', plain, 'ours'):.2f}",
    ]


def latency_tables(figures: Figures) -> list[Section]:
    """Return the tables of latencies. Return [] if no latencies were measured."""
    if not figures.settings.num_alone:
        return []
    header = ["answer", "through", "p50 ms", "p99 ms", "added p50", "added p99"]
    rows: list[list[str]] = []
    for name, streamed in figures.alone.rounds:
        pairs = [figures.alone.percentiles(name, streamed)]
        if name != "server":
            pairs.append(figures.alone.added(name, streamed, "server"))
        cells = [f"{1000 * value:.2f}" for pair in pairs for value in pair]
        cells += [""] * (4 - len(cells))
        shown = "nothing (the server)" if name == "server" else name
        rows.append(["streamed" if streamed else "whole", shown, *cells])
    tails = [
        [
            "streamed" if streamed else "whole",
            *(f"{1000 * value:.2f}" for value in percentiles(tail)),
        ]
        for streamed, tail in figures.tails.items()
    ]
    title = f"N={TAIL_SIBLINGS}: from the last sibling's last byte to the app's first byte"
    tables = [
        ("Latency of requests sent one at a time, 1 KB", header, rows),
        (title, ["answer", "p50 ms", "p99 ms"], tails),
    ]
    return tables if tails else tables[:1]


def summary(figures: Figures) -> str:
    """Return the explanation of the columns, and the figures that have goals."""
    lines = [
        "p+h+s is proxy, hook process and server together. The floor is the CPU time of the bare "
        "relay times the hops of a prompt: 2 for N=1, and 4 for more siblings (once for the lead "
        "and once for all siblings, through proxy and server). N=1 is the proxy without a hook.",
        f"Without requests, the proxy takes {1000 * figures.idle.proxy:.1f} ms of CPU per second, "
        f"its server {1000 * figures.idle.server:.1f} ms.",
        *(f"* {name}: {text}" for name, text in goals(figures)),
    ]
    return "\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:])


def goals(figures: Figures) -> list[tuple[str, str]]:
    """Return a pair (goal, figure) for each goal that can be checked with these figures."""
    sizes, siblings = figures.settings.plan.sizes, figures.settings.siblings
    found: list[tuple[str, str]] = []

    def add(name: str, value: Callable[[], float], goal: float, unit: str = "") -> None:
        figure = value()
        word = "reached" if figure <= goal else "missed"
        found.append((name, f"{figure:.2f}{unit} (goal: at most {goal:g}{unit}, {word})"))

    if "1 KB" in sizes:
        add("proxy's CPU in relays, N=1, whole", lambda: figures.x_relay(streamed=False), 1.7)
        add("proxy's CPU in relays, N=1, streamed", lambda: figures.x_relay(streamed=True), 1.5)
    for num, size, goal in ((8, "1 KB", 4.0), (4, "100 KB", 2.0)):
        if num in siblings and size in sizes:
            for streamed, kind in ((False, "whole"), (True, "streamed")):
                name = f"CPU of proxy, hook and server, N={num} to N=1, {size}, {kind}"
                ratio = figures.x_single(num, size=size, streamed=streamed)
                add(name, lambda ratio=ratio: ratio, goal)
    if figures.settings.num_alone:
        for streamed, kind in ((False, "whole"), (True, "streamed")):
            relay, _ = figures.alone.added(RELAY, streamed, "server")
            ours, _ = figures.alone.added(PLAIN, streamed, "server")
            name = f"added latency above the relay's, N=1, {kind}, p50"
            add(name, lambda ms=1000 * (ours - relay): ms, 0.3, " ms")
        for streamed, tail in figures.tails.items():
            kind = "streamed" if streamed else "whole"
            name = f"last sibling's last byte to the app's first, N={TAIL_SIBLINGS}, {kind}, p50"
            add(name, lambda ms=1000 * percentiles(tail)[0]: ms, 3.0, " ms")
    return found


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        sys.exit("benchmarks.proxy_overhead reads /proc, so it needs Linux.")
    main()
