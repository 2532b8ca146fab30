"""Requests with a seed repeat their answer, although several siblings are sampled and tie."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes

pytestmark = pytest.mark.slow

ALL_TIE = """
def on_compute_relative_reward(valid_results, all_answers):
    return [0.5 for _ in all_answers]
"""
QUESTIONS = ("Is it late?", "Is it raining?", "Is it far?", "Is it true?")
NUM_REPEATS = 6
CHAT = "/v1/chat/completions"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


def start_proxy(processes: Processes) -> Process:
    file = processes.folder / "fakevllm.toml"
    file.write_text("[job]\nnum_repeat = 4\nbatch_size = 10000\n[serve]\nrandom_fraction = 0.3\n")
    hooks = write_hooks(processes.folder / "hooks", ALL_TIE)
    server = processes.server("--backend", "fake")
    return processes.proxy(server, "--config", str(file), "--hooks", str(hooks))


def answer_text(proxy: Process, question: str, **fields: Any) -> str:
    body = {"model": "fake", "messages": [{"role": "user", "content": question}]} | fields
    reply = httpx.post(f"{proxy.url}{CHAT}", json=body, timeout=60)
    assert reply.status_code == 200
    return reply.json()["choices"][0]["message"]["content"]


def test_a_request_with_a_seed_gets_the_same_answer_each_time(processes: Processes) -> None:
    proxy = start_proxy(processes)
    for question in QUESTIONS:
        with ThreadPoolExecutor(NUM_REPEATS) as threads:
            waiting = [
                threads.submit(answer_text, proxy, question, seed=42, temperature=1.0)
                for _ in range(NUM_REPEATS)
            ]
            assert len({one.result() for one in waiting}) == 1
    num_groups = len(QUESTIONS) * NUM_REPEATS
    groups = wait_for_groups(proxy, num_groups)
    assert {group["num_siblings"] for group in groups} == {4}
    query = "SELECT question, COUNT(DISTINCT served_index) AS n FROM groups GROUP BY question"
    assert [row["n"] for row in rows(proxy, query)] == [1] * len(QUESTIONS)


def test_ties_of_requests_with_different_seeds_end_differently(processes: Processes) -> None:
    proxy = start_proxy(processes)
    for seed in range(8):
        answer_text(proxy, QUESTIONS[0], seed=seed)
    for _ in range(8):  # the seed -1 means no seed
        answer_text(proxy, QUESTIONS[1], seed=-1)
    wait_for_groups(proxy, 16)
    query = "SELECT COUNT(DISTINCT served_index) AS n FROM groups GROUP BY question"
    assert all(row["n"] > 1 for row in rows(proxy, query))
