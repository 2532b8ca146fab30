"""Soak proxy and server: many clients send requests for a long time, and often disconnect.

    python -m benchmarks.soak [--minutes 20] [--clients 200] [--siblings 8] [--write]

Half of the requests are streamed, and a third of the answers take about a second. Clients cancel
many requests at a random moment, and half of these clients send the request again as a retry. Open
files, memory, and open and waiting calls are sampled from `/proc` and from `/metrics`. The run has
four quarters. After each quarter, the clients rest until no call is open. Only then do open files
and memory not depend on the load. A leak shows as a trend from the first rest to the last. The
engine is the fake one. The exit code is 1 if a check fails: an answer with status 5xx, an answer
that ends too early, a request that hangs, open files that grow, or calls that stay open. The
benchmark needs Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.ledger_checks import Finding, check_file
from benchmarks.results import conditions, markdown_table, replace_section
from fakevllm_runtime.open_files import raise_file_limit
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes

TITLE = "soak"
KEYS = ("sk-soak-a", "sk-soak-b", "sk-soak-c", "sk-soak-d")
TIMEOUT_S = 120.0
"""Seconds after which a client counts its request as hanging."""
MEAN_PAUSE_S = 12.0
"""Mean of a client's pause between two requests. With 200 clients and 8 siblings, two cores are
busy about half of the time."""
CANCEL_SHARE = 0.5
"""Share of the requests that are cancelled, unless the answer comes first."""
CANCEL_AFTER_S = (0.003, 2.0)
"""Earliest and latest moment of a cancellation, in seconds after the request was sent. The
logarithm of the moment is drawn from a uniform distribution, because many answers take only some
milliseconds."""
SLOW_ANSWER = "[[slow 0.02]] [[say yes, and here are some words more than one chunk can have]]"
SAMPLES_PER_RUN = 120
FILE_SLACK = 40
"""Number of files by which the open files may differ between two rests. Some connections are kept
open for later requests."""
REST_S = 40.0
"""Seconds of a rest after the last call has ended. Idle connections to the server and to the engine
are closed meanwhile."""
REST_SHARE = 0.5
"""Maximum length of a rest, as a fraction of the length of the whole run."""
QUIET_TIMEOUT_S = 120.0
"""Seconds within which all calls must end after the clients have stopped."""
QUARTERS = ("first", "second", "third", "last")
HEADER = ("quarter", "finished", "cancelled", "p50 s", "p99 s", "calls open", "calls waiting")
USAGE_HEADER = ("rest after", "proxy files", "proxy MiB", "server files", "server MiB", "calls")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request."""

    quarter: int
    """Number of the quarter in which the request was sent, from 0."""
    kind: str
    """"whole", "cut off", "cancelled", "hangs", "connection lost", or the status of an error."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a process and its descendants use."""

    files: int
    mib: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One observation of the processes under test."""

    quarter: int
    """Number of the quarter of the run, from 0."""
    proxy: Usage
    server: Usage
    calls_open: float
    """Calls that hold a slot at the server."""
    calls_waiting: float
    engine_calls: float
    """Calls that run or wait in the engine."""

    @property
    def num_calls(self) -> float:
        return self.calls_open + self.calls_waiting + self.engine_calls


@dataclass(slots=True)
class SoakLog:
    """Everything that was observed during a run."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    samples: list[Sample] = field(default_factory=list[Sample])
    """Samples that were taken under load."""
    rests: list[Sample] = field(default_factory=list[Sample])
    """One sample before the first request, and one at the end of each rest."""

    def times(self, quarter: int) -> list[float]:
        """Return the durations in seconds of all complete answers of a quarter, in ascending
        order."""
        outcomes = [one for one in self.outcomes if one.quarter == quarter]
        return sorted(one.seconds for one in outcomes if one.kind == "whole")


def usage(pid: int) -> Usage:
    """Return the open files and the resident memory of a process with its descendants. The usage is
    0 for a process that has just ended."""
    process = Path(f"/proc/{pid}")
    try:
        num_files = sum(1 for _ in (process / "fd").iterdir())
        status = (process / "status").read_text()
        threads = list((process / "task").iterdir())
        children = [int(n) for one in threads for n in (one / "children").read_text().split()]
    except OSError:
        return Usage(0, 0.0)
    resident = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
    below = [usage(child) for child in children]
    return Usage(
        num_files + sum(one.files for one in below),
        sum(resident) / 1024 + sum(one.mib for one in below),
    )


# --- the clients


@dataclass(slots=True)
class Client:
    """One client, which sends requests one after the other."""

    number: int
    url: str
    http: aiohttp.ClientSession
    chance: random.Random
    log: SoakLog
    quarter: int
    num_sent: int = 0

    async def run(self, until: float) -> None:
        """Send requests until the monotonic time `until`."""
        mean = min(MEAN_PAUSE_S, (until - time.monotonic()) / 4)
        await asyncio.sleep(self.chance.uniform(0, mean))
        while time.monotonic() < until:
            body = self._next_body()
            if await self._send(body) == "cancelled" and self.chance.random() < 0.5:
                await self._send(body, {"x-stainless-retry-count": "1"})
            await asyncio.sleep(self.chance.uniform(0, 2 * mean))

    def _next_body(self) -> dict[str, object]:
        self.num_sent += 1
        name = f"client {self.number}, request {self.quarter}.{self.num_sent}"
        text = f"Say yes or no, {name}."
        if self.num_sent % 3 == 0:
            text = f"{text} {SLOW_ANSWER}"
        messages = [{"role": "user", "content": text}]
        return {"model": "fake", "messages": messages, "stream": self.chance.random() < 0.5}

    async def _send(self, body: dict[str, object], headers: dict[str, str] | None = None) -> str:
        """Send a request, possibly cancel it, log the outcome, and return the outcome's kind."""
        is_cancelled = self.chance.random() < CANCEL_SHARE
        low, high = map(math.log, CANCEL_AFTER_S)
        limit_s = math.exp(self.chance.uniform(low, high)) if is_cancelled else TIMEOUT_S
        started = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                kind = await self._receive(body, headers or {})
        except TimeoutError:
            kind = "cancelled" if is_cancelled else "hangs"
        except aiohttp.ClientPayloadError:
            kind = "cut off"
        except aiohttp.ClientError:
            kind = "connection lost"
        self.log.outcomes.append(Outcome(self.quarter, kind, time.monotonic() - started))
        return kind

    async def _receive(self, body: dict[str, object], headers: dict[str, str]) -> str:
        key = {"Authorization": f"Bearer {KEYS[self.number % len(KEYS)]}"}
        async with self.http.post(self.url, json=body, headers=key | headers) as response:
            raw = await response.read()
        if response.status != 200:
            return str(response.status)
        end = b"data: [DONE]" if body["stream"] else b'"finish_reason":"stop"'
        return "whole" if end in raw and b'"error"' not in raw else "cut off"


# --- the run


async def run(proxy: Process, server: Process, options: argparse.Namespace) -> SoakLog:
    """Run all quarters and their rests, and return what was observed."""
    chance = random.Random(options.seed)
    seconds, log = options.minutes * 60, SoakLog()
    stack = Stack(proxy, server)
    log.rests.append(await stack.take_sample(0))
    for quarter in range(len(QUARTERS)):
        sampling = asyncio.create_task(
            sample_regularly(stack, log, quarter, seconds / SAMPLES_PER_RUN)
        )
        seed = chance.getrandbits(32)
        await send_requests(proxy, log, quarter, options.clients, seconds / len(QUARTERS), seed)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while (await stack.take_sample(quarter)).num_calls and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        await asyncio.sleep(min(REST_S, REST_SHARE * seconds))
        log.rests.append(await stack.take_sample(quarter))
    return log


async def send_requests(
    proxy: Process, log: SoakLog, quarter: int, num_clients: int, seconds: float, seed: int
) -> None:
    """Run all clients for one quarter."""
    url, chance = f"{proxy.url}/v1/chat/completions", random.Random(seed)
    until = time.monotonic() + seconds
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(num_clients):
            own_chance = random.Random(chance.random())
            client = Client(number, url, http, own_chance, log, quarter)
            group.create_task(client.run(until))


async def sample_regularly(stack: Stack, log: SoakLog, quarter: int, every_s: float) -> None:
    """Append samples to the log until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        log.samples.append(await stack.take_sample(quarter))


@dataclass(frozen=True, slots=True)
class Stack:
    """The processes under test."""

    proxy: Process
    server: Process

    async def take_sample(self, quarter: int) -> Sample:
        """Return what the processes use at this moment."""
        headers = {"Authorization": f"Bearer {KEYS[0]}", "Connection": "close"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.get(f"{self.proxy.url}/metrics") as response,
        ):
            response.raise_for_status()
            page = await response.text()
        values: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(page):
            for point in family.samples:
                values[point.name] += point.value
        return Sample(
            quarter=quarter,
            proxy=usage(self.proxy.pid),
            server=usage(self.server.pid),
            calls_open=values["fakevllm_calls_open"],
            calls_waiting=values["fakevllm_calls_waiting"],
            engine_calls=values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"],
        )


# --- the report


def check(log: SoakLog) -> list[Finding]:
    """Return the results of all checks."""
    kinds = Counter(outcome.kind for outcome in log.outcomes)
    num_5xx = sum(count for kind, count in kinds.items() if kind.startswith("5"))
    num_broken = kinds["cut off"] + kinds["hangs"] + kinds["connection lost"]
    num_left = [rest.num_calls for rest in log.rests]
    return [
        Finding("requests by outcome", str(dict(sorted(kinds.items()))), bool(kinds["whole"])),
        Finding("no answer has status 5xx", f"{num_5xx}", num_5xx == 0),
        Finding("no answer is cut off or missing", f"{num_broken}", num_broken == 0),
        Finding("no call is open at a rest", f"{num_left}", not any(num_left)),
        check_files("the proxy's", [rest.proxy.files for rest in log.rests[1:]]),
        check_files("the server's", [rest.server.files for rest in log.rests[1:]]),
        compare_latencies(log),
    ]


def check_files(whose: str, files: Sequence[int]) -> Finding:
    """Check that the open files at the last rest are not more than at the first."""
    is_flat = files[-1] <= files[0] + FILE_SLACK
    return Finding(f"{whose} open files at the rests do not grow", f"{list(files)}", is_flat)


def compare_latencies(log: SoakLog) -> Finding:
    """Return a line for the report, which is not checked: the latencies in the first and in the
    last quarter."""
    medians = [statistics.median(log.times(n) or [math.nan]) for n in (0, len(QUARTERS) - 1)]
    figures = f"{medians[0]:.2f} s in the first quarter, {medians[1]:.2f} s in the last"
    return Finding("median latency of whole answers", figures, None)


def traffic_rows(log: SoakLog) -> list[list[str]]:
    """Return one row for each quarter: requests, latencies of the whole answers, and calls."""
    rows: list[list[str]] = []
    for number, name in enumerate(QUARTERS):
        kinds = Counter(one.kind for one in log.outcomes if one.quarter == number)
        samples = [one for one in log.samples if one.quarter == number]
        times = log.times(number) or [math.nan]
        rows.append(
            [
                name,
                str(kinds["whole"]),
                str(kinds["cancelled"]),
                f"{statistics.median(times):.2f}",
                f"{times[int(0.99 * (len(times) - 1))]:.2f}",
                _median([one.calls_open for one in samples]),
                _median([one.calls_waiting for one in samples]),
            ]
        )
    return rows


def usage_rows(log: SoakLog) -> list[list[str]]:
    """Return one row for each rest, and one for the time before the first request."""
    return [
        [
            name,
            f"{rest.proxy.files}",
            f"{rest.proxy.mib:.0f}",
            f"{rest.server.files}",
            f"{rest.server.mib:.0f}",
            f"{rest.num_calls:.0f}",
        ]
        for name, rest in zip(("start", *QUARTERS), log.rests, strict=True)
    ]


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f}" if values else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the run")
    parser.add_argument("--clients", type=int, default=200, help="number of clients")
    parser.add_argument("--siblings", type=int, default=8, help="siblings of each request")
    parser.add_argument("--seed", type=int, default=0, help="seed of the clients' traffic")
    parser.add_argument("--write", action="store_true", help="write the tables into RESULTS.md")
    options = parser.parse_args(arguments)
    raise_file_limit()
    head = conditions()
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as started:
        hooks = write_hooks(Path(name) / "hooks", PREFER_YES)
        keys = Path(name) / "keys"
        keys.write_text("".join(f"{key}\n" for key in KEYS))
        server = started.server("--backend", "fake")
        flags = ("--n", str(options.siblings), "--key-file", str(keys))
        proxy = started.proxy(server, "--hooks", str(hooks), *flags)
        log = asyncio.run(run(proxy, server, options))
        findings = check(log)
        proxy.stop()
        findings.append(check_file(proxy.folder / "ledger.sqlite"))
    checks = [[one.mark, one.claim, one.figures] for one in findings]
    tables = "\n".join(
        (
            markdown_table(HEADER, traffic_rows(log)),
            markdown_table(USAGE_HEADER, usage_rows(log)),
            markdown_table(("", "what must hold", "figures"), checks),
        )
    )
    print(tables)
    if options.write:
        replace_section(TITLE, f"{head}\n{tables}")
    sys.exit(1 if any(one.holds is False for one in findings) else 0)


if __name__ == "__main__":
    main()
