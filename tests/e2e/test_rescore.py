"""`fakevllm rescore` on ledgers of real runs, also while the proxy uses them."""

from __future__ import annotations

import json
import sqlite3
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import ledger_file, rows, wait_for_groups
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Processes
from tests.e2e.test_released_run import ARCHIVE, POOLED_BEFORE, TRAINED_BEFORE

FINGERPRINT = """
import hashlib
import json

def on_compute_relative_reward(valid_results, all_answers, question):
    def number(sibling, answer):
        seen = [sibling.index, sibling.task.model_dump(), sibling.finish_reason, sibling.episode_id]
        seen += [list(sibling.messages), answer, question]
        text = json.dumps(seen, sort_keys=True)
        return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16**12
    return [number(*pair) for pair in zip(valid_results, all_answers)]
"""
"""Hooks whose reward depends on everything that they get, except the token usage."""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def rescore(folder: Path, *arguments: str) -> dict[str, Any]:
    figures = folder / "figures.json"
    command = ["-m", "fakevllm", "rescore", "--json", str(figures), *arguments]
    done = PRELOADED_PYTHON.run(command, folder)
    assert done.returncode == 0, done.stderr
    return json.loads(figures.read_text())


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_same_hooks_give_the_same_rewards_to_requests_of_all_formats(
    processes: Processes, tmp_path: Path
) -> None:
    hooks = write_hooks(tmp_path / "hooks", FINGERPRINT)
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text('{"question": "Is it 1?", "answer": "yes"}\n')
    server = processes.server("--backend", "fake")
    flags = ("--hooks", str(hooks), "--n", "4", "--dataset", str(dataset))
    proxy = processes.proxy(server, *flags)

    def post(path: str, **body: object) -> Any:
        reply = httpx.post(f"{proxy.url}/v1/{path}", json={"model": "fake", **body}, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    chat = post("chat/completions", messages=user("Is it 1?"))
    answer = chat["choices"][0]["message"]
    history = [*user("Is it 1?"), answer, *user("And “2”, — äöü?")]
    post("chat/completions", messages=history, tools=[TOOL])
    post("chat/completions", messages=user("Cut off?"), max_tokens=2)
    post("completions", prompt="Once upon a time")
    first = post("responses", input="Is it 3?")
    post("responses", input="And 4?", previous_response_id=first["id"])
    post("messages", messages=user("Is it 5?"), max_tokens=20)
    wait_for_groups(proxy, 7, states="pooled trained dropped")

    where = ("--run-dir", str(proxy.folder), "--dataset", str(dataset))
    figures = rescore(tmp_path, "--hooks", str(hooks), *where)
    assert (figures["num_compared"], figures["num_without_task"]) == (7, 0)
    assert rows(proxy, "SELECT COUNT(*) FROM groups WHERE task_id IS NOT NULL")[0][0] >= 1
    assert figures["num_siblings"] == 28
    differing = rows(
        proxy,
        'SELECT * FROM rescored JOIN siblings USING (group_id, "index") '
        "WHERE rescored.reward IS NOT siblings.reward",
    )
    assert [(row["group_id"], row["index"]) for row in differing] == []
    assert figures["correlation"] == pytest.approx(1.0)


def test_the_proxy_serves_while_its_ledger_is_rescored(
    processes: Processes, yes_hooks: Path, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    body = {"model": "fake", "messages": user("Yes or no?")}
    for _ in range(20):
        httpx.post(f"{proxy.url}/v1/chat/completions", json=body).raise_for_status()
    wait_for_groups(proxy, 20, states="pooled trained dropped")
    no_hooks = write_hooks(tmp_path / "no", PREFER_YES.replace('"yes"', '"no"'))
    num_answered, is_over = 20, threading.Event()

    def keep_asking() -> None:
        nonlocal num_answered
        while not is_over.is_set():
            httpx.post(f"{proxy.url}/v1/chat/completions", json=body).raise_for_status()
            num_answered += 1

    with ThreadPoolExecutor(1) as app:
        asking = app.submit(keep_asking)
        try:
            figures = rescore(
                tmp_path, "--hooks", str(no_hooks), "--ledger", str(ledger_file(proxy))
            )
        finally:
            is_over.set()
        asking.result(timeout=60)
    assert figures["num_compared"] >= 20
    assert figures["correlation"] == pytest.approx(-1.0)
    assert num_answered > 20
    groups = wait_for_groups(proxy, num_answered, states="pooled trained dropped")
    assert len(groups) == num_answered
    assert httpx.get(f"{proxy.url}/fakevllm/stats").json()["ledger_dropped"] == 0


def test_a_ledger_of_an_earlier_version_is_rescored_on_a_copy(
    yes_hooks: Path, tmp_path: Path
) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    ledger = tmp_path / "run" / "ledger.sqlite"
    before = ledger.read_bytes()
    figures = rescore(tmp_path, "--hooks", str(yes_hooks), "--ledger", str(ledger))
    assert figures["num_compared"] == TRAINED_BEFORE + POOLED_BEFORE
    assert figures["old"] == figures["new"]
    assert ledger.read_bytes() == before
    (copy,) = ledger.parent.glob("ledger.m*.sqlite")
    with closing(sqlite3.connect(copy)) as db:
        (num_siblings,) = db.execute("SELECT COUNT(*) FROM rescored").fetchone()
    assert num_siblings == figures["num_siblings"]
