"""Measure the serve policies: time to the first token, and the latency of a quorum.

    python -m benchmarks.serve_policies [--requests 20] [--groups 100] [--write]

First tokens: one request at a time is sent to one of four endpoints: the engine's own socket, the
server, and two proxies with 4 siblings and the policies `lead` and `best`. The endpoints take
turns, so that all are measured under the same conditions. The next request is sent when all
siblings of the previous request are complete. The embedded engine runs a Qwen3 with 25 million
random weights. The prompts for this engine have about 512 tokens, and all prompts differ.

The comparison of a quorum with the best of all siblings is in `quorum_latency.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.quorum_latency import measure_quorum, write_config
from benchmarks.results import conditions, markdown_table, print_table, replace_section
from benchmarks.rollout import make_model, prompts
from tests.e2e.processes import Process, Processes

TITLE = "serve_policies"
NUM_WARM_UP = 3
TOKENS = 3
"""Length of an answer whose first token is timed."""
FAKE_FIRST_TOKEN_S = (0.02, 0.25)
SLOW_S, MAX_ADDED_S, MAX_RATIO = 0.2, 0.005, 1.05
"""Limits for the time until the app gets its first token with the policy `lead`. If the engine
alone needs SLOW_S seconds or more for its first token, the app's time may be at most MAX_RATIO
times the engine's time. Otherwise the app's time may be at most MAX_ADDED_S seconds longer."""
CONTENT = re.compile(rb'"content":\s?"[^"]')
IN_FLIGHT = re.compile(r"^fakevllm_siblings_in_flight (\d+)", re.MULTILINE)


@dataclass(slots=True)
class Latencies:
    """Seconds to the first and to the last token, by round, for one endpoint of one engine."""

    first_s: list[float] = field(default_factory=list[float])
    whole_s: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address to which requests are sent: engine, server or proxy."""

    name: str
    http: aiohttp.ClientSession
    url: str
    proxy: Process | None = None
    """The proxy's process, None for the engine and the server."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--requests", type=int, default=20, help="requests per engine and endpoint")
    parser.add_argument(
        "--groups", type=int, default=100, help="groups per kind of rewards and proxy"
    )
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    args = parser.parse_args()
    text = conditions()
    with tempfile.TemporaryDirectory(prefix="fakevllm-") as folder:
        latencies = _measure_first_tokens(Path(folder), args.requests)
        quorum_table = measure_quorum(Path(folder), args.groups)
    sections = [_first_token_table(latencies), quorum_table]
    for header, rows in sections:
        print_table(header, rows)
    summary = _summary(latencies)
    print(summary)
    if args.write:
        tables = "\n".join(markdown_table(header, rows) for header, rows in sections)
        replace_section(TITLE, f"{text}\n{tables}\n{summary}")


# --- first tokens


def _measure_first_tokens(folder: Path, num: int) -> dict[tuple[str, str], Latencies]:
    latencies: dict[tuple[str, str], Latencies] = {}
    with Processes(folder / "fake") as started:
        for delay_s in FAKE_FIRST_TOKEN_S:
            engine = f"fake, {1000 * delay_s:.0f} ms a token"
            texts = (f"[[slow {delay_s}]] [[say {'y' * TOKENS}]] {n}" for n in itertools.count())
            parts = _start(started, ["--backend", "fake"], f"{delay_s}")
            latencies |= asyncio.run(_measure(engine, "fake", *parts, texts, num))
    model = make_model(folder / "model")
    with Processes(folder / "embedded") as started:
        parts = _start(started, ["--backend", "embedded", "--model", str(model)], "own")
        latencies |= asyncio.run(_measure("embedded", "model", *parts, prompts(), num))
    return latencies


def _start(
    started: Processes, arguments: list[str], name: str
) -> tuple[Path, Process, list[Process]]:
    """Start a server and a proxy of each policy, and return the engine's socket, the server, and
    the proxies. Nothing is trained, because no batch ever fills."""
    folder = started.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(
        "def on_compute_relative_reward(valid_results, all_answers):\n"
        "    return [float(len(answer['content'] or '')) for answer in all_answers]\n"
    )
    server = started.server(*arguments, folder=f"{name}-server")
    proxies = [
        started.proxy(
            server,
            "--config",
            str(write_config(folder, policy)),
            folder=f"{name}-{policy}",
            wait=False,
        )
        for policy in ("lead", "best")
    ]
    for proxy in proxies:
        proxy.wait_until_healthy(120.0)
    return next(server.folder.glob("engine-*.sock")), server, proxies


async def _measure(
    engine: str,
    model: str,
    socket: Path,
    server: Process,
    proxies: Sequence[Process],
    texts: Iterator[str],
    num: int,
) -> dict[tuple[str, str], Latencies]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as direct,
        aiohttp.ClientSession() as http,
    ):
        endpoints = [
            Endpoint("the engine's socket", direct, "http://engine"),
            Endpoint("the server", http, server.url),
            Endpoint("lead, N=4", http, proxies[0].url, proxies[0]),
            Endpoint("best, N=4", http, proxies[1].url, proxies[1]),
        ]
        latencies = {(engine, endpoint.name): Latencies() for endpoint in endpoints}
        for number in range(num + NUM_WARM_UP):
            for endpoint in endpoints:
                first_s, whole_s = await _send(endpoint, model, next(texts))
                if number >= NUM_WARM_UP:
                    latencies[engine, endpoint.name].first_s.append(first_s)
                    latencies[engine, endpoint.name].whole_s.append(whole_s)
    return latencies


async def _send(endpoint: Endpoint, model: str, text: str) -> tuple[float, float]:
    """Send a streamed request, and return the seconds to the first and to the last token.

    Wait until the proxy has no sibling in flight any more.
    """
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True}
    body |= {"max_tokens": TOKENS, "ignore_eos": True}
    started, first_s = time.perf_counter(), None
    async with endpoint.http.post(f"{endpoint.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        while chunk := await answer.content.readany():
            if first_s is None and CONTENT.search(chunk):
                first_s = time.perf_counter() - started
    whole_s = time.perf_counter() - started
    assert first_s is not None, "the answer has no token"
    while endpoint.proxy is not None and await _num_in_flight(endpoint) > 0:
        await asyncio.sleep(0.02)
    return first_s, whole_s


async def _num_in_flight(endpoint: Endpoint) -> int:
    async with endpoint.http.get(f"{endpoint.url}/metrics") as response:
        gauge = IN_FLIGHT.search(await response.text())
    assert gauge is not None
    return int(gauge[1])


def _first_token_table(
    latencies: dict[tuple[str, str], Latencies],
) -> tuple[list[str], list[list[str]]]:
    header = ["engine", "endpoint", "first token p50 ms", "added ms", "x engine", "whole p50 ms"]
    rows: list[list[str]] = []
    for (engine, endpoint), sample in latencies.items():
        direct = latencies[engine, "the engine's socket"]
        added, ratio = _added(sample, direct)
        first, whole = (1000 * statistics.median(x) for x in (sample.first_s, sample.whole_s))
        difference = ["", ""] if sample is direct else [f"{1000 * added:.2f}", f"{ratio:.3f}"]
        rows.append([engine, endpoint, f"{first:.2f}", *difference, f"{whole:.1f}"])
    return header, rows


def _added(sample: Latencies, engine: Latencies) -> tuple[float, float]:
    """Return (difference, ratio) between the time to the first token and the engine's own time.

    Both results are medians over the rounds. In each round, the two times were measured one after
    the other.
    """
    pairs = list(zip(sample.first_s, engine.first_s, strict=True))
    return (
        statistics.median(through - direct for through, direct in pairs),
        statistics.median(through / direct for through, direct in pairs),
    )


def _summary(latencies: dict[tuple[str, str], Latencies]) -> str:
    results: list[str] = []
    for engine in dict.fromkeys(engine for engine, _ in latencies):
        direct = latencies[engine, "the engine's socket"]
        added, ratio = _added(latencies[engine, "lead, N=4"], direct)
        is_slow = statistics.median(direct.first_s) >= SLOW_S
        is_within = ratio <= MAX_RATIO if is_slow else added <= MAX_ADDED_S
        difference = f"{ratio:.3f} times" if is_slow else f"{1000 * added:.2f} ms added"
        results.append(f"{engine}: {difference}, {'within' if is_within else 'BEYOND'} the limit")
    return (
        f"Limits of the policy lead: if the engine's own first token takes {1000 * SLOW_S:.0f} ms "
        f"or more, the first token takes at most {MAX_RATIO} times as long; otherwise it comes at "
        f"most {1000 * MAX_ADDED_S:.0f} ms later. Both are medians over rounds. "
        f"{'; '.join(results)}."
    )


if __name__ == "__main__":
    main()
