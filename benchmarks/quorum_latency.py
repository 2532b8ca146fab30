"""Compare the best answer of a quorum with the best answer of all siblings: how much sooner the
answer comes, and how often another sibling is served.

The fake engine gives answers with random lengths and qualities. Both proxies get the same answers.
The hook reads the quality from the answer. `serve_policies.py` uses this module.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from contextlib import closing
from pathlib import Path
from sqlite3 import connect
from typing import Any

import aiohttp

from tests.e2e.processes import Process, Processes, wait_until

NUM_SIBLINGS = 4
QUORUM = 3
TOKEN_S, MEDIAN_TOKENS, SPREAD = 0.004, 40, 0.7
"""Seconds per token, and the log-normal distribution of the answers' lengths: its median in tokens,
and the standard deviation of the logarithm."""
HOOK = f"""
import math, random

def on_user_submit_new_requests(request_id, task):
    chance = random.Random(task.main_query)
    prefers_long = task.main_query.endswith("long")
    others = [draw_message(chance, prefers_long) for _ in range({NUM_SIBLINGS - 1})]
    return [{{}}] + [{{"messages": [message]}} for message in others]

def draw_message(chance, prefers_long):
    length = int({MEDIAN_TOKENS} * math.exp({SPREAD} * chance.gauss(0, 1))) + 1
    quality = chance.gauss(0, 1) + (math.log(length) if prefers_long else 0.0)
    text = f"{{quality:.6f}} " + "x" * length
    return {{"role": "user", "content": f"[[slow {TOKEN_S}]] [[say {{text}}]]"}}

def on_compute_relative_reward(valid_results, all_answers):
    return [float(answer["content"].split()[0]) for answer in all_answers]
"""
KINDS = {"": "independent of length", " long": "higher for longer answers"}
"""The meaning of the rewards, by the suffix of the question."""


def measure_quorum(folder: Path, num: int) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table over `num` groups for each kind and proxy."""
    folder = folder / "quorum"
    folder.mkdir()
    (folder / "hook.py").write_text(HOOK)
    with Processes(folder) as started:
        server = started.server("--backend", "fake")
        proxies: dict[str, Process] = {}
        for name, setting in (("all", ""), ("quorum", f"quorum = {QUORUM}\n")):
            (folder / name).mkdir()
            config = write_config(folder, "best", setting).rename(folder / f"{name}.toml")
            proxies[name] = started.proxy(server, "--config", str(config), folder=name)
        latencies = asyncio.run(_measure_latencies(proxies, num))
        header = ["rewards", "p50 s, all 4", f"p50 s, {QUORUM} of 4", "ratio", "ratio of p95"]
        header += ["winner changes", "reward lost, in SDs"]
        rows: list[list[str]] = []
        for kind, name in KINDS.items():
            all_p50, all_p95 = _percentiles(latencies["all", kind])
            quorum_p50, quorum_p95 = _percentiles(latencies["quorum", kind])
            changed, lost = _read_effect(proxies["quorum"], kind, num)
            ratios = [f"{quorum_p50 / all_p50:.2f}", f"{quorum_p95 / all_p95:.2f}"]
            effect = [f"{100 * changed:.0f} %", f"{lost:.2f}"]
            rows.append([name, f"{all_p50:.3f}", f"{quorum_p50:.3f}", *ratios, *effect])
    return header, rows


def _percentiles(latencies: list[float]) -> tuple[float, float]:
    """Return the percentiles p50 and p95."""
    cuts = statistics.quantiles(latencies, n=20)
    return cuts[9], cuts[18]


async def _measure_latencies(
    proxies: dict[str, Process], num: int
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each request by proxy and kind."""
    latencies: dict[tuple[str, str], list[float]] = {}
    async with aiohttp.ClientSession() as http:
        for number in range(num):
            for kind, name in itertools.product(KINDS, proxies):
                started_at = time.perf_counter()
                body = _draw_request(number, kind)
                async with http.post(
                    f"{proxies[name].url}/v1/chat/completions", json=body
                ) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
                latencies.setdefault((name, kind), []).append(time.perf_counter() - started_at)
    return latencies


def _draw_request(number: int, kind: str) -> object:
    """Return the request of the lead (the first sibling). It is drawn in the same way as the hook
    draws the requests of the other siblings."""
    words: dict[str, Any] = {}
    exec(HOOK, words)
    message = words["draw_message"](random.Random(f"{number}{kind}"), bool(kind))
    message["content"] += f" {number}{kind}"
    return {"model": "fake", "messages": [message]}


def _read_effect(proxy: Process, kind: str, num: int) -> tuple[float, float]:
    """Return the share of groups in which the served sibling is not the best of all siblings, and
    the mean of (reward of the best sibling - reward of the served sibling), in standard deviations
    of all rewards."""
    where = "question LIKE '% long'" if kind else "question NOT LIKE '% long'"
    query = (
        f"SELECT g.served_index <> g.best_index, b.reward - s.reward FROM groups AS g "
        f"JOIN siblings AS s ON s.group_id = g.group_id AND s.served "
        f"JOIN siblings AS b ON b.group_id = g.group_id AND b.best WHERE {where}"
    )
    rows: list[tuple[int, float]] = []

    def is_complete() -> bool:
        nonlocal rows
        with closing(connect(proxy.folder / "ledger.sqlite")) as ledger:
            rows = ledger.execute(query).fetchall()
        return len(rows) == num

    wait_until(is_complete, 60, f"{num} groups in the ledger")
    with closing(connect(proxy.folder / "ledger.sqlite")) as ledger:
        rewards = ledger.execute(
            f"SELECT s.reward FROM groups AS g JOIN siblings AS s USING (group_id) WHERE {where}"
        ).fetchall()
    spread = statistics.pstdev(reward for (reward,) in rewards)
    return (
        statistics.mean(is_other for is_other, _ in rows),
        statistics.mean(lost for _, lost in rows) / spread,
    )


def write_config(folder: Path, policy: str, setting: str = "") -> Path:
    """Write a proxy's configuration. `setting` is a further line of the section `[serve]`."""
    file = folder / f"{policy}.toml"
    file.write_text(
        f"[hooks]\npath = {json.dumps(str(folder))}\n\n[serve]\npolicy = {json.dumps(policy)}\n"
        f"{setting}\n[job]\nnum_repeat = {NUM_SIBLINGS}\nbatch_size = 10000\n"
    )
    return file
