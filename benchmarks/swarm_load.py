"""What the swarm server takes for the episodes of active clients: latency of claims and ends, CPU
of its process, beside a plain FastAPI and SQLite; and how that grows with its journal.

    python -m benchmarks.swarm_load [--episodes 4000] [--rows 1000000] [--write]

All get the same waves of the same client in turns, so that all see the same machine. CPU is user +
system time of the process, from /proc (Linux only).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import swarm_floor, swarm_rows
from benchmarks.results import conditions, markdown_table, replace_section
from benchmarks.swarm_waves import Sample, Target, Waves
from tests.e2e.processes import Process, Processes, free_port

AT_ONCE = (10, 100, 1000)
FEW_ROWS = 1000
GROWN_AT_ONCE = 100
TITLE = "swarm_load"
MS = ("claim p50 / p99 ms", "end p50 / p99 ms", "CPU ms/claim", "CPU ms/end", "CPU ms/episode")
HEADER = ("episodes at once", "through", *MS, "x floor")
GROWN_HEADER = (
    "rows at the start",
    "file MB",
    "process up s",
    "engine up s",
    *MS,
    "rows at the end",
)


@dataclass(slots=True)
class Grown:
    """A server on a journal of so many rows."""

    target: Target
    num_rows: int
    up_s: float
    """From the start of its process until it answers."""
    num_bytes: int
    engine_up_s: float = 0.0
    rows_at_the_end: int = 0

    @property
    def run_dir(self) -> Path:
        return self.target.process.folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=4000, help="Per target and level.")
    parser.add_argument("--rows", type=int, default=1_000_000, help="Of the grown journal.")
    parser.add_argument("--write", action="store_true", help="Put the tables into RESULTS.md.")
    args = parser.parse_args()
    told = conditions()
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as started:
        samples = uvloop.run(_beside_floor(_start(started), args.episodes))
    _show("the swarm server beside its floor", HEADER, beside := _beside_rows(samples))
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as started:
        grown = [_start_grown(started, num_rows) for num_rows in (FEW_ROWS, args.rows)]
        samples_of = uvloop.run(_grown_samples(grown, args.episodes))
        for one in grown:
            one.target.process.stop()
            one.rows_at_the_end = swarm_rows.num_rows(one.run_dir)
    rows = [_grown_row(one, samples_of[one.num_rows]) for one in grown]
    _show("on a journal that has grown", GROWN_HEADER, rows)
    if args.write:
        tables = markdown_table(HEADER, beside), markdown_table(GROWN_HEADER, rows)
        replace_section(TITLE, f"{told}\n{tables[0]}\n{tables[1]}\n{_reading(samples)}")


def _start(started: Processes) -> list[Target]:
    port, folder = free_port(), started.folder / "floor"
    command = [swarm_floor.__file__, "--file", str(folder / "floor.sqlite"), "--port", str(port)]
    floor = started.adopt(Process("floor", command, port, folder)).wait_until_healthy()
    server = started.server("--backend", "fake")
    return [Target("floor", floor, has_model=False), Target("fakevllm-server", server)]


async def _beside_floor(
    targets: Sequence[Target], num_episodes: int
) -> dict[tuple[int, str], Sample]:
    samples: dict[tuple[int, str], Sample] = {}
    async with _http() as http:
        waves = Waves(http)
        await waves.start_engine(targets[1])
        for at_once in AT_ONCE:
            for target in targets:
                samples[at_once, target.name] = Sample()
                await waves.run(target, at_once, Sample())  # opens its connections
            for _ in range(max(2, num_episodes // at_once)):
                for target in targets:
                    await waves.run(target, at_once, samples[at_once, target.name])
    return samples


def _start_grown(started: Processes, num_rows: int) -> Grown:
    name = f"server-{num_rows}"
    swarm_rows.fill(started.folder / name, num_rows)
    num_bytes = (started.folder / name / "journal.sqlite").stat().st_size
    began = time.perf_counter()
    server = started.server("--backend", "fake", folder=name)
    up_s = time.perf_counter() - began
    return Grown(Target(name, server), swarm_rows.num_rows(server.folder), up_s, num_bytes)


async def _grown_samples(grown: Sequence[Grown], num_episodes: int) -> dict[int, Sample]:
    samples = {one.num_rows: Sample() for one in grown}
    async with _http() as http:
        waves = Waves(http)
        for one in grown:
            one.engine_up_s = await waves.start_engine(one.target)
            await waves.run(one.target, GROWN_AT_ONCE, Sample())
        for _ in range(max(2, num_episodes // GROWN_AT_ONCE)):
            for one in grown:
                await waves.run(one.target, GROWN_AT_ONCE, samples[one.num_rows])
    return samples


def _http() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30))


def _beside_rows(samples: dict[tuple[int, str], Sample]) -> list[list[str]]:
    return [
        [f"{at_once:,}", name, *_figures(sample), f"{_of_floor(samples, at_once, name):.2f}"]
        for (at_once, name), sample in samples.items()
    ]


def _grown_row(one: Grown, sample: Sample) -> list[str]:
    started = [f"{one.num_bytes / 1e6:.0f}", f"{one.up_s:.1f}", f"{one.engine_up_s:.1f}"]
    return [f"{one.num_rows:,}", *started, *_figures(sample), f"{one.rows_at_the_end:,}"]


def _figures(sample: Sample) -> list[str]:
    latencies = [_ms(sample.claims.latencies_s), _ms(sample.ends.latencies_s)]
    cpu = sample.claims.cpu_ms, sample.ends.cpu_ms, sample.cpu_ms
    return [*latencies, *(f"{one:.2f}" for one in cpu)]


def _of_floor(samples: dict[tuple[int, str], Sample], at_once: int, name: str) -> float:
    return samples[at_once, name].cpu_ms / samples[at_once, "floor"].cpu_ms


def _reading(samples: dict[tuple[int, str], Sample]) -> str:
    ratios = [f"{_of_floor(samples, at_once, 'fakevllm-server'):.1f}" for at_once in AT_ONCE]
    return (
        f"An episode takes {', '.join(ratios)} times the floor's CPU. All claims of a wave are "
        "sent at once, then all ends, so latencies are mostly queueing: that of the last in the "
        "queue is the whole wave's. The floor flushes for each request, the server for all that "
        "wait together, so on a slow disk the server is the quicker one."
    )


def _show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


def _ms(latencies_s: Sequence[float]) -> str:
    """p50 and p99."""
    cuts = statistics.quantiles(latencies_s, n=100)
    return f"{1000 * cuts[49]:.1f} / {1000 * cuts[98]:.1f}"


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        sys.exit("swarm_load reads /proc: it runs on Linux only.")
    main()
