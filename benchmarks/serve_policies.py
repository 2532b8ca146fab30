"""What serve policies cost and save: the time to the first token where the lead's tokens are the
app's, and the best of a quorum beside the best of all (`quorum_of_groups.py`).

    python -m benchmarks.serve_policies [--requests 20] [--groups 100] [--write]

First tokens: one request at a time goes to the engine's own socket, to the server and to proxies
with 4 siblings, in turns, so that all see the same machine; the next begins when the siblings of
the last are done. The embedded engine runs a Qwen3 of 25 million random weights over prompts of
about 512 tokens, each a new one.
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
from rich.console import Console
from rich.table import Table

from benchmarks.quorum_of_groups import quorums, write_config
from benchmarks.results import conditions, markdown_table, replace_section
from benchmarks.rollout import make_model, prompts
from tests.e2e.processes import Process, Processes

TITLE = "serve_policies"
NUM_WARM_UP = 3
TOKENS = 3
"""Of an answer of which the first token counts."""
FAKE_FIRST_TOKEN_S = (0.02, 0.25)
SLOW_S, MOST_ADDED_S, MOST_RATIO = 0.2, 0.005, 1.05
"""A first token this slow may become so many times slower, a faster one so much later."""
CONTENT = re.compile(rb'"content":\s?"[^"]')
IN_FLIGHT = re.compile(r"^fakevllm_siblings_in_flight (\d+)", re.MULTILINE)


@dataclass(slots=True)
class First:
    """One way to one engine."""

    first_s: list[float] = field(default_factory=list[float])
    whole_s: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    http: aiohttp.ClientSession
    url: str
    proxy: Process | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--requests", type=int, default=20, help="Per engine and way.")
    parser.add_argument("--groups", type=int, default=100, help="Per kind of rewards and proxy.")
    parser.add_argument("--write", action="store_true", help="Put the tables into RESULTS.md.")
    args = parser.parse_args()
    told = conditions()
    with tempfile.TemporaryDirectory(prefix="fakevllm-") as folder:
        firsts = _first_tokens(Path(folder), args.requests)
        late = quorums(Path(folder), args.groups)
    sections = [_first_table(firsts), late]
    for header, rows in sections:
        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        Console(width=140).print(table)
    reading = _reading(firsts)
    print(reading)
    if args.write:
        tables = "\n".join(markdown_table(header, rows) for header, rows in sections)
        replace_section(TITLE, f"{told}\n{tables}\n{reading}")


# --- first tokens


def _first_tokens(folder: Path, num: int) -> dict[tuple[str, str], First]:
    firsts: dict[tuple[str, str], First] = {}
    with Processes(folder / "fake") as started:
        for delay_s in FAKE_FIRST_TOKEN_S:
            engine = f"fake, {1000 * delay_s:.0f} ms a token"
            texts = (f"[[slow {delay_s}]] [[say {'y' * TOKENS}]] {n}" for n in itertools.count())
            ways = _ways(started, ["--backend", "fake"], f"{delay_s}")
            firsts |= asyncio.run(_measure(engine, "fake", *ways, texts, num))
    model = make_model(folder / "model")
    with Processes(folder / "embedded") as started:
        ways = _ways(started, ["--backend", "embedded", "--model", str(model)], "own")
        firsts |= asyncio.run(_measure("embedded", "model", *ways, prompts(), num))
    return firsts


def _ways(
    started: Processes, arguments: list[str], name: str
) -> tuple[Path, Process, list[Process]]:
    """The engine's socket, the server, and proxies of both policies. Nothing is trained: no batch
    ever fills."""
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
) -> dict[tuple[str, str], First]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as direct,
        aiohttp.ClientSession() as http,
    ):
        ways = [
            Way("the engine's socket", direct, "http://engine"),
            Way("the server", http, server.url),
            Way("lead, N=4", http, proxies[0].url, proxies[0]),
            Way("best, N=4", http, proxies[1].url, proxies[1]),
        ]
        firsts = {(engine, way.name): First() for way in ways}
        for number in range(num + NUM_WARM_UP):
            for way in ways:
                first_s, whole_s = await _ask(way, model, next(texts))
                if number >= NUM_WARM_UP:
                    firsts[engine, way.name].first_s.append(first_s)
                    firsts[engine, way.name].whole_s.append(whole_s)
    return firsts


async def _ask(way: Way, model: str, text: str) -> tuple[float, float]:
    """Seconds to the first token, and to the last."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True}
    body |= {"max_tokens": TOKENS, "ignore_eos": True}
    began, first_s = time.perf_counter(), None
    async with way.http.post(f"{way.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        while chunk := await answer.content.readany():
            if first_s is None and CONTENT.search(chunk):
                first_s = time.perf_counter() - began
    whole_s = time.perf_counter() - began
    assert first_s is not None, "an answer without a token"
    while way.proxy is not None and await _in_flight(way) > 0:
        await asyncio.sleep(0.02)
    return first_s, whole_s


async def _in_flight(way: Way) -> int:
    async with way.http.get(f"{way.url}/metrics") as told:
        found = IN_FLIGHT.search(await told.text())
    assert found is not None
    return int(found[1])


def _first_table(firsts: dict[tuple[str, str], First]) -> tuple[list[str], list[list[str]]]:
    header = ["engine", "asked at", "first token p50 ms", "added ms", "x engine", "whole p50 ms"]
    rows: list[list[str]] = []
    for (engine, way), sample in firsts.items():
        own = firsts[engine, "the engine's socket"]
        added, ratio = _added(sample, own)
        is_own = sample is own
        first, whole = (1000 * statistics.median(x) for x in (sample.first_s, sample.whole_s))
        told = ["", ""] if is_own else [f"{1000 * added:.2f}", f"{ratio:.3f}"]
        rows.append([engine, way, f"{first:.2f}", *told, f"{whole:.1f}"])
    return header, rows


def _added(sample: First, own: First) -> tuple[float, float]:
    """Seconds and ratio: medians over the turns, each beside the engine's own of the same turn."""
    pairs = list(zip(sample.first_s, own.first_s, strict=True))
    return (
        statistics.median(mine - theirs for mine, theirs in pairs),
        statistics.median(mine / theirs for mine, theirs in pairs),
    )


def _reading(firsts: dict[tuple[str, str], First]) -> str:
    kept: list[str] = []
    for engine in dict.fromkeys(engine for engine, _ in firsts):
        own = firsts[engine, "the engine's socket"]
        added, ratio = _added(firsts[engine, "lead, N=4"], own)
        is_slow = statistics.median(own.first_s) >= SLOW_S
        is_kept = ratio <= MOST_RATIO if is_slow else added <= MOST_ADDED_S
        limit = f"{ratio:.3f} times" if is_slow else f"{1000 * added:.2f} ms added"
        kept.append(f"{engine}: {limit}, {'within' if is_kept else 'BEYOND'} the limit")
    return (
        f"Promised of the policy lead: a first token at most {MOST_RATIO} times the engine's own "
        f"where that is {1000 * SLOW_S:.0f} ms or more, else at most {1000 * MOST_ADDED_S:.0f} ms "
        f"later, as the median over turns. {'; '.join(kept)}."
    )


if __name__ == "__main__":
    main()
