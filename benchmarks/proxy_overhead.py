"""Measure what the proxy costs: CPU time of its process, and latency.

    python -m benchmarks.proxy_overhead [--requests 2000] [--litellm] [--write]

Two proxies are measured: one with N=1, without a hook and with a ledger, and one with N=8 and a
hook. The same load goes to the server itself, through a bare relay, through the proxies and, with
`--litellm`, through LiteLLM's proxy. They take turns, so that all run under the same conditions.
The server has a fake engine. CPU time is the user and system time of the relaying process and its
children (such as the hook process), from /proc (Linux only).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from sqlite3 import connect

import aiohttp
import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.proxy_parts import bare_relay, litellm_proxy
from benchmarks.results import conditions, markdown_table, replace_section
from tests.e2e.processes import Process, Processes, free_port, wait_until

CONCURRENCY = 8
ROUNDS = 4
NUM_WARM_UP = 200
NUM_ALONE = 1000
"""Number of requests sent one at a time, for a latency without queueing."""
BODY_BYTES = 1200
ANSWER = "The quick brown fox jumps over."
"""Text of each answer. One byte is one token of the fake engine, and one chunk of a stream."""
FINISHED = re.compile(rb'"finish_reason":\s?"stop"')
HOOK = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(index) for index in range(len(all_answers))]
"""
TITLE = "proxy_overhead"
RELAY = Path(bare_relay.__file__)


@dataclass(slots=True)
class Sample:
    """Measurements of one target under one kind of load, from all rounds."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    busy_s: list[float] = field(default_factory=list[float])
    """Latencies of requests sent over CONCURRENCY connections at once."""
    alone_s: list[float] = field(default_factory=list[float])
    """Latencies of requests sent one at a time."""

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds per request."""
        return 1000 * self.cpu_s / len(self.busy_s)

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return len(self.busy_s) / self.wall_s


@dataclass(frozen=True, slots=True)
class Target:
    """A process that receives the load."""

    name: str
    process: Process
    divisor: int = 1
    """The target gets 1/divisor of the requests. A slow target needs fewer for the same time."""

    def num_sent(self, num_requests: int) -> int:
        """Return the number of requests that the target gets, streamed and whole."""
        each = ROUNDS * (
            num_requests // self.divisor // ROUNDS + NUM_ALONE // self.divisor // ROUNDS
        )
        return 2 * (NUM_WARM_UP // self.divisor + each)


Samples = dict[tuple[str, bool], Sample]
"""Samples by name of the target and whether the answers are streamed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--requests", type=int, default=2000, help="requests per target and kind of answer"
    )
    parser.add_argument("--litellm", action="store_true", help="measure LiteLLM's proxy too")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    text = conditions()
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as started:
        targets = _start(started, with_litellm=args.litellm)
        samples = uvloop.run(_measure(targets, args.requests))
        for target in targets:
            if target.name.startswith("fakevllm"):
                _check_ledger(target.process, target.num_sent(args.requests))
    header, rows = _table(samples)
    table = Table(*header, title="the proxy compared with a bare relay")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
    if args.write:
        replace_section(TITLE, f"{text}\n{markdown_table(header, rows)}\n{_summary(samples)}")


def _start(started: Processes, *, with_litellm: bool) -> list[Target]:
    server = started.server("--backend", "fake")
    proxy = started.proxy(server, "--n", "1")
    hook = started.folder / "hook.py"
    hook.write_text(HOOK)
    # This proxy has its own server. Otherwise the first proxy would read this one's training steps
    # in the server's run log.
    trained = started.server("--backend", "fake", folder="server-8")
    fan_out = started.proxy(trained, "--n", "8", "--hooks", str(hook), folder="proxy-8")
    targets = [
        Target("server", server),
        Target("bare relay", _start_relay(started, server, RELAY)),
        Target("fakevllm", proxy),
        Target("fakevllm N=8, hook", fan_out, divisor=8),
    ]
    if with_litellm:
        litellm_proxy.prepare_environment(litellm_proxy.ENVIRONMENT)
        litellm = _start_relay(started, server, Path(litellm_proxy.__file__))
        targets.append(Target(f"LiteLLM {litellm_proxy.VERSION}", litellm, divisor=4))
    return targets


def _start_relay(started: Processes, server: Process, program: Path) -> Process:
    port = free_port()
    command = [str(program), "--upstream", server.url, "--port", str(port)]
    process = Process(program.stem, command, port, started.folder / program.stem)
    return started.adopt(process).wait_until_healthy()


async def _measure(targets: Sequence[Target], num_requests: int) -> Samples:
    samples: Samples = {}
    connector = aiohttp.TCPConnector(limit=CONCURRENCY, keepalive_timeout=30)
    async with aiohttp.ClientSession(connector=connector) as http:
        for streamed in (False, True):
            body = _body(streamed)
            for target in targets:
                samples[target.name, streamed] = Sample()
                await _send(http, target, body, NUM_WARM_UP // target.divisor, CONCURRENCY)
            for _ in range(ROUNDS):
                for target in targets:
                    sample = samples[target.name, streamed]
                    total = num_requests // target.divisor // ROUNDS
                    await _measure_round(http, target, body, total, sample)
    return samples


async def _measure_round(
    http: aiohttp.ClientSession, target: Target, body: bytes, num_requests: int, sample: Sample
) -> None:
    cpu, started = cpu_seconds(target.process.pid), time.perf_counter()
    sample.busy_s += await _send(http, target, body, num_requests, CONCURRENCY)
    sample.wall_s += time.perf_counter() - started
    sample.cpu_s += cpu_seconds(target.process.pid) - cpu
    sample.alone_s += await _send(http, target, body, NUM_ALONE // target.divisor // ROUNDS, 1)


async def _send(
    http: aiohttp.ClientSession, target: Target, body: bytes, total: int, concurrency: int
) -> list[float]:
    """Send `total` requests over `concurrency` connections, and return their latencies."""
    url = f"{target.process.url}/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    latencies: list[float] = []
    tickets = iter(range(total))

    async def work() -> None:
        for _ in tickets:
            started = time.perf_counter()
            async with http.post(url, data=body, headers=headers) as answer:
                raw = await answer.read()
            latencies.append(time.perf_counter() - started)
            assert answer.status == 200 and FINISHED.search(raw), raw

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return latencies


def _body(streamed: bool) -> bytes:
    question = f"[[say {ANSWER}]] "
    messages = [{"role": "user", "content": question}]
    body = {"model": "fake", "messages": messages, "stream": streamed}
    messages[0]["content"] += "x" * (BODY_BYTES - len(orjson.dumps(body)))
    return orjson.dumps(body)


def _check_ledger(proxy: Process, num_sent: int) -> None:
    """Check that the ledger has a row for every request. A proxy that drops rows needs less CPU."""

    def complete() -> bool:
        with closing(connect(proxy.folder / "ledger.sqlite")) as ledger:
            (count,) = ledger.execute(
                "select count(*) from groups where served_index is not null"
            ).fetchone()
        return count == num_sent

    wait_until(complete, 30, f"{num_sent} groups in the ledger")


def _table(samples: Samples) -> tuple[list[str], list[list[str]]]:
    header = ["load", "through", "CPU ms/request", "x bare relay", "requests/s"]
    header += ["p50 / p99 ms, 8 at once", "p50 / p99 ms, alone", "added alone, p50 / p99"]
    rows: list[list[str]] = []
    for (name, streamed), sample in samples.items():
        bare, direct = samples["bare relay", streamed], samples["server", streamed]
        is_relay = sample is not direct
        added = _ms(
            [
                a - b
                for a, b in zip(
                    _percentiles(sample.alone_s), _percentiles(direct.alone_s), strict=True
                )
            ]
        )
        rows.append(
            [
                "streamed" if streamed else "whole",
                name if is_relay else "nothing (the server)",
                f"{sample.cpu_ms:.2f}",
                f"{sample.cpu_ms / bare.cpu_ms:.2f}" if is_relay else "",
                f"{sample.per_s:.0f}",
                _ms(_percentiles(sample.busy_s)),
                _ms(_percentiles(sample.alone_s)),
                added if is_relay else "",
            ]
        )
    return header, rows


def _summary(samples: Samples) -> str:
    """Return what the figures mean in a few sentences."""
    whole, streamed = (
        samples["fakevllm", kind].cpu_ms / samples["bare relay", kind].cpu_ms
        for kind in (False, True)
    )
    peers = [name for name, _ in samples if name.startswith("LiteLLM")]
    beside = "".join(
        f"{name} takes {samples[name, kind].cpu_ms / samples['fakevllm', kind].cpu_ms:.1f} times "
        f"the CPU of fakevllm's proxy for {'streamed' if kind else 'whole'} answers. "
        for name, kind in zip(peers, (False, True), strict=False)
    )
    return beside + (
        f"The proxy's process takes {whole:.1f} times the CPU of the bare relay for whole answers "
        f"and {streamed:.1f} times for streamed ones ({len(ANSWER) + 1} tokens). Added latency is "
        "the difference from the server's own percentiles. At p99 the machine's noise outweighs it."
    )


def _percentiles(latencies: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p99."""
    cuts = statistics.quantiles(latencies, n=100)
    return cuts[49], cuts[98]


def _ms(pair: Sequence[float]) -> str:
    return " / ".join(f"{1000 * value:.2f}" for value in pair)


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process, its threads, and its running children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        sys.exit("benchmarks.proxy_overhead reads /proc, so it needs Linux.")
    main()
