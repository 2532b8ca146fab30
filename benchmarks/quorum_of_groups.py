"""The best of a quorum beside the best of all: how much sooner, and how often another one.

Answers of the fake engine whose lengths and qualities are drawn, the same for both proxies; the
hook reads the quality off the answer. Part of `serve_policies.py`.
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
"""Of the drawn answers: lengths are log-normal."""
HOOK = f"""
import math, random

def on_user_submit_new_requests(request_id, task):
    chance = random.Random(task.main_query)
    prefers_long = task.main_query.endswith("long")
    others = [drawn(chance, prefers_long) for _ in range({NUM_SIBLINGS - 1})]
    return [{{}}] + [{{"messages": [message]}} for message in others]

def drawn(chance, prefers_long):
    length = int({MEDIAN_TOKENS} * math.exp({SPREAD} * chance.gauss(0, 1))) + 1
    quality = chance.gauss(0, 1) + (math.log(length) if prefers_long else 0.0)
    said = f"{{quality:.6f}} " + "x" * length
    return {{"role": "user", "content": f"[[slow {TOKEN_S}]] [[say {{said}}]]"}}

def on_compute_relative_reward(valid_results, all_answers):
    return [float(answer["content"].split()[0]) for answer in all_answers]
"""
KINDS = {"": "of no matter which length", " long": "better the longer"}


def quorums(folder: Path, num: int) -> tuple[list[str], list[list[str]]]:
    folder = folder / "quorum"
    folder.mkdir()
    (folder / "hook.py").write_text(HOOK)
    with Processes(folder) as started:
        server = started.server("--backend", "fake")
        proxies: dict[str, Process] = {}
        for name, more in (("all", ""), ("quorum", f"quorum = {QUORUM}\n")):
            (folder / name).mkdir()
            config = write_config(folder, "best", more).rename(folder / f"{name}.toml")
            proxies[name] = started.proxy(server, "--config", str(config), folder=name)
        latencies = asyncio.run(_play(proxies, num))
        header = ["rewards", "p50 s, all 4", f"p50 s, {QUORUM} of 4", "ratio", "ratio of p95"]
        header += ["winner changes", "reward lost, in SDs"]
        rows: list[list[str]] = []
        for kind, name in KINDS.items():
            mine, theirs = latencies["quorum", kind], latencies["all", kind]
            changed, lost = _changed(proxies["quorum"], kind, num)
            cuts = [statistics.quantiles(x, n=20) for x in (theirs, mine)]
            (whole, _), (part, _) = pairs = [(cut[9], cut[18]) for cut in cuts]
            ratios = [f"{mine / theirs:.2f}" for theirs, mine in zip(*pairs, strict=True)]
            told = [f"{100 * changed:.0f} %", f"{lost:.2f}"]
            rows.append([name, f"{whole:.3f}", f"{part:.3f}", *ratios, *told])
    return header, rows


async def _play(proxies: dict[str, Process], num: int) -> dict[tuple[str, str], list[float]]:
    latencies: dict[tuple[str, str], list[float]] = {}
    async with aiohttp.ClientSession() as http:
        for number in range(num):
            for kind, name in itertools.product(KINDS, proxies):
                began = time.perf_counter()
                body = _drawn(number, kind)
                async with http.post(
                    f"{proxies[name].url}/v1/chat/completions", json=body
                ) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
                latencies.setdefault((name, kind), []).append(time.perf_counter() - began)
    return latencies


def _drawn(number: int, kind: str) -> object:
    """The lead draws its own as the hook does for the others."""
    words: dict[str, Any] = {}
    exec(HOOK, words)
    message = words["drawn"](random.Random(f"{number}{kind}"), bool(kind))
    message["content"] += f" {number}{kind}"
    return {"model": "fake", "messages": [message]}


def _changed(proxy: Process, kind: str, num: int) -> tuple[float, float]:
    """Share of groups whose best came late, and the mean reward that was lost by it, in standard
    deviations of all rewards."""
    where = "question LIKE '% long'" if kind else "question NOT LIKE '% long'"
    query = (
        f"SELECT g.served_index <> g.best_index, b.reward - s.reward FROM groups AS g "
        f"JOIN siblings AS s ON s.group_id = g.group_id AND s.served "
        f"JOIN siblings AS b ON b.group_id = g.group_id AND b.best WHERE {where}"
    )
    rows: list[tuple[int, float]] = []

    def complete() -> bool:
        nonlocal rows
        with closing(connect(proxy.folder / "ledger.sqlite")) as ledger:
            rows = ledger.execute(query).fetchall()
        return len(rows) == num

    wait_until(complete, 60, f"{num} groups in the ledger")
    with closing(connect(proxy.folder / "ledger.sqlite")) as ledger:
        rewards = ledger.execute(
            f"SELECT s.reward FROM groups AS g JOIN siblings AS s USING (group_id) WHERE {where}"
        ).fetchall()
    spread = statistics.pstdev(reward for (reward,) in rewards)
    return (
        statistics.mean(is_other for is_other, _ in rows),
        statistics.mean(lost for _, lost in rows) / spread,
    )


def write_config(folder: Path, policy: str, more: str = "") -> Path:
    file = folder / f"{policy}.toml"
    file.write_text(
        f"[hooks]\npath = {json.dumps(str(folder))}\n\n[serve]\npolicy = {json.dumps(policy)}\n"
        f"{more}\n[job]\nnum_repeat = {NUM_SIBLINGS}\nbatch_size = 10000\n"
    )
    return file
