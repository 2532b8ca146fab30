"""Measure a crowd: many apps that send one request each at the same moment.

    python -m benchmarks.crowd [--apps 100 500 1000 2000] [--siblings 1 4 8] [--write]

Half of the apps stream. The apps share four API keys. The engine is the fake one, so that the time
is that of the proxy and the server. An answer is whole if it has status 200, contains no error, and
ends as its format demands. The open files and the memory of the proxy come from its `/metrics`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import track

from benchmarks.results import conditions, markdown_table, replace_section
from fakevllm_runtime.open_files import raise_file_limit
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes

TITLE = "crowd"
KEYS = ("sk-crowd-a", "sk-crowd-b", "sk-crowd-c", "sk-crowd-d")
TIMEOUT_S = 300.0
"""Seconds after which an app gives up."""
SAMPLE_EVERY_S = 0.5
METRIC = re.compile(r"^(fakevllm_proxy_process_\w+|fakevllm_calls_waiting\{.*\}) (\S+)$", re.M)
HEADER = ("apps", "N", "whole", "5xx", "429", "other", "p50 s", "p99 s", "all s", "files", "MiB")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that one app received."""

    status: int
    """HTTP status; 0 if the connection failed."""
    is_whole: bool
    seconds: float


@dataclass(slots=True)
class Peak:
    """The highest values that the proxy's metrics had during a crowd."""

    open_files: float = 0.0
    memory_mib: float = 0.0

    def observe(self, metrics: str) -> None:
        """Read a page of `/metrics`."""
        values = {name: float(value) for name, value in METRIC.findall(metrics)}
        self.open_files = max(self.open_files, values["fakevllm_proxy_process_open_fds"])
        resident = values["fakevllm_proxy_process_resident_memory_bytes"]
        self.memory_mib = max(self.memory_mib, resident / 2**20)


async def ask(http: aiohttp.ClientSession, url: str, number: int) -> Answer:
    """Send the request of one app, and read the answer to its end."""
    is_streamed = number % 2 == 1
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": f"Say yes or no, app {number}."}],
        "stream": is_streamed,
    }
    headers = {"Authorization": f"Bearer {KEYS[number % len(KEYS)]}"}
    started = time.monotonic()
    try:
        async with http.post(url, json=body, headers=headers) as response:
            raw, status = await response.read(), response.status
    except (aiohttp.ClientError, TimeoutError):
        return Answer(0, False, time.monotonic() - started)
    end = b"data: [DONE]" if is_streamed else b'"finish_reason":"stop"'
    is_whole = status == 200 and end in raw and b'"error"' not in raw
    return Answer(status, is_whole, time.monotonic() - started)


async def observe(http: aiohttp.ClientSession, proxy: Process, peak: Peak) -> None:
    """Sample the proxy's metrics until cancelled."""
    while True:
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        async with http.get(f"{proxy.url}/metrics", headers=headers) as response:
            if response.status == 200:
                peak.observe(await response.text())
        await asyncio.sleep(SAMPLE_EVERY_S)


async def crowd(proxy: Process, num_apps: int) -> tuple[list[Answer], float, Peak]:
    """Return the answers of all apps, the seconds until the last answer, and the highest values
    that the proxy's metrics had meanwhile."""
    peak = Peak()
    url = f"{proxy.url}/v1/chat/completions"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
        aiohttp.ClientSession(timeout=timeout) as observer,
    ):
        observing = asyncio.create_task(observe(observer, proxy, peak))
        started = time.monotonic()
        answers = await asyncio.gather(*(ask(http, url, number) for number in range(num_apps)))
        seconds = time.monotonic() - started
        observing.cancel()
        await asyncio.gather(observing, return_exceptions=True)
    return answers, seconds, peak


def measure(num_apps: int, num_siblings: int) -> list[str]:
    """Return one row of the table. Each row has a server and a proxy of its own."""
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as started:
        hooks = write_hooks(Path(name) / "hooks", PREFER_YES)
        keys = Path(name) / "keys"
        keys.write_text("".join(f"{key}\n" for key in KEYS))
        server = started.server("--backend", "fake")
        proxy = started.proxy(
            server, "--hooks", str(hooks), "--n", str(num_siblings), "--key-file", str(keys)
        )
        answers, seconds, peak = asyncio.run(crowd(proxy, num_apps))
    counts = Counter(answer.status for answer in answers)
    num_whole = sum(answer.is_whole for answer in answers)
    num_5xx = sum(count for status, count in counts.items() if status >= 500)
    times = sorted(answer.seconds for answer in answers if answer.is_whole) or [float("nan")]
    others = num_apps - num_whole - num_5xx - counts[429]
    return [
        *map(str, (num_apps, num_siblings, num_whole, num_5xx, counts[429], others)),
        f"{statistics.median(times):.2f}",
        f"{times[int(0.99 * (len(times) - 1))]:.2f}",
        f"{seconds:.1f}",
        f"{peak.open_files:.0f}",
        f"{peak.memory_mib:.0f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--apps", type=int, nargs="+", default=[100, 500, 1000, 2000])
    parser.add_argument("--siblings", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--write", action="store_true", help="Write the table into RESULTS.md.")
    options = parser.parse_args(arguments)
    raise_file_limit()
    head = conditions()
    cases = [(apps, n) for n in options.siblings for apps in options.apps]
    rows = [measure(apps, n) for apps, n in track(cases, "crowds", console=Console(stderr=True))]
    table = markdown_table(HEADER, rows)
    print(table)
    if options.write:
        replace_section(TITLE, f"{head}\n{table}")


if __name__ == "__main__":
    main()
