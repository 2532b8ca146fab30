"""Measure the latency of claims and ends of episodes, and the CPU time of the swarm server.

    python -m benchmarks.swarm_load [--episodes 4000] [--rows 1000000] [--write]

The server is compared with a minimal server of FastAPI and SQLite. Then a server with a small
journal is compared with one whose journal has many rows. One client sends the same waves of
episodes to each of these servers. The servers take turns, so that all are measured under the same
conditions. CPU time is the user and system time of the process, from /proc (Linux only).
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

from benchmarks.results import conditions, markdown_table, replace_section
from benchmarks.swarm_parts import journal_filler, minimal_server
from benchmarks.swarm_parts.episode_waves import Sample, Target, Waves
from tests.e2e.processes import Process, Processes, free_port

AT_ONCE = (10, 100, 1000)
FEW_ROWS = 1000
JOURNAL_AT_ONCE = 100
TITLE = "swarm_load"
MS = ("claim p50 / p99 ms", "end p50 / p99 ms", "CPU ms/claim", "CPU ms/end", "CPU ms/episode")
HEADER = ("episodes at once", "through", *MS, "x baseline")
JOURNAL_HEADER = (
    "rows at the start",
    "file MB",
    "process up s",
    "engine up s",
    *MS,
    "rows at the end",
)


@dataclass(slots=True)
class JournalServer:
    """A server that was started on a journal with `num_rows` rows."""

    target: Target
    num_rows: int
    up_s: float
    """Seconds from the start of the server's process until the server answered."""
    num_bytes: int
    engine_up_s: float = 0.0
    rows_at_the_end: int = 0

    @property
    def run_dir(self) -> Path:
        return self.target.process.folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--episodes", type=int, default=4000, help="episodes per target and level of concurrency"
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the large journal")
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    args = parser.parse_args()
    text = conditions()
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as started:
        samples = uvloop.run(_compare_with_baseline(_start(started), args.episodes))
    _print_table("the swarm server and the baseline", HEADER, compared := _comparison_rows(samples))
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as started:
        servers = [_start_on_journal(started, num_rows) for num_rows in (FEW_ROWS, args.rows)]
        samples_of = uvloop.run(_compare_journals(servers, args.episodes))
        for server in servers:
            server.target.process.stop()
            server.rows_at_the_end = journal_filler.num_rows(server.run_dir)
    rows = [_journal_row(server, samples_of[server.num_rows]) for server in servers]
    _print_table("servers on a small and on a large journal", JOURNAL_HEADER, rows)
    if args.write:
        tables = markdown_table(HEADER, compared), markdown_table(JOURNAL_HEADER, rows)
        replace_section(TITLE, f"{text}\n{tables[0]}\n{tables[1]}\n{_summary(samples)}")


def _start(started: Processes) -> list[Target]:
    port, folder = free_port(), started.folder / "baseline"
    command = [
        minimal_server.__file__,
        "--file",
        str(folder / "baseline.sqlite"),
        "--port",
        str(port),
    ]
    baseline = started.adopt(Process("baseline", command, port, folder)).wait_until_healthy()
    server = started.server("--backend", "fake")
    return [Target("baseline", baseline, has_model=False), Target("fakevllm-server", server)]


async def _compare_with_baseline(
    targets: Sequence[Target], num_episodes: int
) -> dict[tuple[int, str], Sample]:
    samples: dict[tuple[int, str], Sample] = {}
    async with _create_session() as http:
        waves = Waves(http)
        await waves.start_engine(targets[1])
        for at_once in AT_ONCE:
            for target in targets:
                samples[at_once, target.name] = Sample()
                await waves.run(target, at_once, Sample())  # opens the connections
            for _ in range(max(2, num_episodes // at_once)):
                for target in targets:
                    await waves.run(target, at_once, samples[at_once, target.name])
    return samples


def _start_on_journal(started: Processes, num_rows: int) -> JournalServer:
    name = f"server-{num_rows}"
    journal_filler.fill(started.folder / name, num_rows)
    num_bytes = (started.folder / name / "journal.sqlite").stat().st_size
    start_s = time.perf_counter()
    server = started.server("--backend", "fake", folder=name)
    up_s = time.perf_counter() - start_s
    return JournalServer(
        Target(name, server), journal_filler.num_rows(server.folder), up_s, num_bytes
    )


async def _compare_journals(
    servers: Sequence[JournalServer], num_episodes: int
) -> dict[int, Sample]:
    samples = {server.num_rows: Sample() for server in servers}
    async with _create_session() as http:
        waves = Waves(http)
        for server in servers:
            server.engine_up_s = await waves.start_engine(server.target)
            await waves.run(server.target, JOURNAL_AT_ONCE, Sample())
        for _ in range(max(2, num_episodes // JOURNAL_AT_ONCE)):
            for server in servers:
                await waves.run(server.target, JOURNAL_AT_ONCE, samples[server.num_rows])
    return samples


def _create_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30))


def _comparison_rows(samples: dict[tuple[int, str], Sample]) -> list[list[str]]:
    return [
        [
            f"{at_once:,}",
            name,
            *_figures(sample),
            f"{_ratio_to_baseline(samples, at_once, name):.2f}",
        ]
        for (at_once, name), sample in samples.items()
    ]


def _journal_row(server: JournalServer, sample: Sample) -> list[str]:
    started = [f"{server.num_bytes / 1e6:.0f}", f"{server.up_s:.1f}", f"{server.engine_up_s:.1f}"]
    return [f"{server.num_rows:,}", *started, *_figures(sample), f"{server.rows_at_the_end:,}"]


def _figures(sample: Sample) -> list[str]:
    latencies = [_ms(sample.claims.latencies_s), _ms(sample.ends.latencies_s)]
    cpu = sample.claims.cpu_ms, sample.ends.cpu_ms, sample.cpu_ms
    return [*latencies, *(f"{one:.2f}" for one in cpu)]


def _ratio_to_baseline(samples: dict[tuple[int, str], Sample], at_once: int, name: str) -> float:
    return samples[at_once, name].cpu_ms / samples[at_once, "baseline"].cpu_ms


def _summary(samples: dict[tuple[int, str], Sample]) -> str:
    ratios = [
        f"{_ratio_to_baseline(samples, at_once, 'fakevllm-server'):.1f}" for at_once in AT_ONCE
    ]
    return (
        f"An episode takes {', '.join(ratios)} times the baseline's CPU time. All claims of a wave "
        "are sent at once, then all ends, so latencies are mostly queueing time: the latency of "
        "the last request is that of the whole wave. The baseline flushes for each request. The "
        "server flushes once for all requests that wait, so on a slow disk the server is faster."
    )


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


def _ms(latencies_s: Sequence[float]) -> str:
    """Return the percentiles p50 and p99 in milliseconds, as text."""
    cuts = statistics.quantiles(latencies_s, n=100)
    return f"{1000 * cuts[49]:.1f} / {1000 * cuts[98]:.1f}"


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        sys.exit("benchmarks.swarm_load reads /proc, so it needs Linux.")
    main()
