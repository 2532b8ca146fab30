"""The proxy's own routes: statistics and task keys."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from rich.console import Console

from fakevllm.cli.status_table import as_table
from fakevllm.config.model import load
from fakevllm.runtime.status_rows import status_rows
from fakevllm.web.proxy_components import ProxyComponents, open_proxy
from fakevllm.web.routes import admin
from fakevllm_adapters.protocol.swarm import Task
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.scripted_swarm import ScriptedSwarm

TASKS = {"tasks": [{"task_id": "t1", "main_query": "hi"}]}


@asynccontextmanager
async def open_client(
    folder: Path, **proxy_flags: Path
) -> AsyncGenerator[tuple[ProxyComponents, httpx.AsyncClient]]:
    async with ScriptedSwarm() as swarm:
        flags = {"proxy": {"run_dir": folder, **proxy_flags}, "swarm": {"url": swarm.url}}
        async with open_proxy(load(None, flags)) as proxy:
            app = FastAPI()
            app.include_router(admin.router(proxy))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
                yield proxy, client


async def test_writes_that_the_ledger_gave_up_are_shown(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (proxy, client):
        stats = (await client.get("/fakevllm/stats")).json()
        assert (stats["ledger_dropped"], stats["ledger_error"]) == (0, None)
        proxy.ledger.put_tasks([Task(task_id="t", metadata={"bad": object()})])
        assert await proxy.ledger.flush()
        stats = (await client.get("/fakevllm/stats")).json()
        assert stats["ledger_dropped"] == 1 and "not JSON serializable" in stats["ledger_error"]


async def test_the_status_shows_the_bytes_per_request(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (proxy, client):
        assert "ledger" not in dict(status_rows((await client.get("/fakevllm/stats")).json()))
        for number in range(4):
            proxy.ledger.record(group(f"g{number}"))
        assert await proxy.ledger.flush()
        stats = (await client.get("/fakevllm/stats")).json()
    size = stats["ledger_bytes"]
    assert 50_000 < size < 1_000_000
    assert dict(status_rows(stats))["ledger"] == (
        f"{size / 1e6:.1f} MB, {size // 4:,} bytes per request"
    )


async def test_a_step_in_which_only_a_greedy_answer_was_scored_has_no_policy_mean(
    tmp_path: Path,
) -> None:
    async with open_client(tmp_path) as (proxy, client):
        greedy = replace(group("g", [1.0, None], served=0, step=1), served_by="greedy")
        proxy.ledger.record(greedy)
        assert await proxy.ledger.flush()
        for query in ("", "?curve=ends"):
            reply = await client.get(f"/fakevllm/stats{query}")
            (step,) = reply.json()["curve"]
            assert (step["policy_mean"], step["returned_best"]) == (None, 1.0)
            assert "policy mean" not in dict(status_rows(reply.json()))


async def test_the_curve_belongs_to_the_newest_run_or_the_requested_one(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (proxy, client):
        for at, name in enumerate(("aaaaaaaaaaaa", "bbbbbbbbbbbb"), 1):
            proxy.ledger.record(group(name, [0.0, float(at)], served=1, received_at=float(at)))
            proxy.ledger.settle(name, "pooled", None, at, [], name)
        assert await proxy.ledger.flush()
        newest = (await client.get("/fakevllm/stats")).json()
        older = (await client.get("/fakevllm/stats?run=aa")).json()
        none = await client.get("/fakevllm/stats?run=c")
    assert (newest["run_id"], newest["other_runs"]) == ("bbbbbbbbbbbb", ["aaaaaaaaaaaa"])
    assert [one["step"] for one in newest["curve"]] == [2]
    assert older["run_id"] == "aaaaaaaaaaaa" and older["curve"][0]["policy_mean"] == 0.5
    assert none.status_code == 404 and "aaaaaaaaaaaa." in none.json()["error"]["message"]
    assert list(status_rows(newest))[-3:] == [
        ("run", "bbbbbbbb; 1 more, with --run: aaaaaaaa"),
        ("policy mean", "1.00 → 1.00 in 1 step"),
        ("returned best", "2.00 → 2.00 in 1 step"),
    ]
    collecting = newest | {"engine": {"run_id": newest["run_id"], "global_step": 2}}
    assert (
        list(status_rows(collecting))[-2][1]
        == "1.00 → 1.00 in 0 steps, and the one being collected"
    )
    collecting["engine"]["run_id"] = "another"
    assert list(status_rows(collecting))[-2][1] == "1.00 → 1.00 in 1 step"


def test_the_ends_of_a_curve_begin_where_the_hooks_changed() -> None:
    means = [0.5, 0.81, 3.0, 3.22]
    curve: list[dict[str, Any]] = [
        {"step": at, "policy_mean": mean, "returned_best": None, "groups": 40, "changed": ""}
        for at, mean in enumerate(means, 1)
    ]
    stats: dict[str, Any] = {
        "engine": None,
        "counts": {},
        "untrained": {},
        "paused": False,
        "run_id": "r",
    }
    stats |= {"other_runs": [], "ledger_dropped": 0, "ledger_error": None}
    whole = dict(status_rows(stats | {"curve": curve}))
    assert whole["policy mean"] == "0.50 → 3.22 in 4 steps" and "curve" not in whole
    curve[2]["changed"] = "the hooks changed"
    rows = dict(status_rows(stats | {"curve": curve}))
    assert rows["policy mean"] == "3.00 → 3.22 in 2 steps"
    assert rows["curve"].startswith("begins at step 3: the hooks changed. The 2 steps before")


def rows_while_collecting(step: int, change_at: int | None = None) -> dict[str, str]:
    """Return the status of a ledger with four steps while the server collects `step`. The hooks
    have changed at the step `change_at`."""
    curve: list[dict[str, Any]] = [
        {"step": at, "policy_mean": 0.5, "returned_best": None, "groups": 40} for at in range(1, 5)
    ]
    if change_at is not None:
        curve[change_at - 1]["changed"] = "the hooks changed"
    engine = {"run_id": "r", "global_step": step}
    stats = {"curve": curve, "run_id": "r", "other_runs": [], "engine": engine, "paused": False}
    stats |= {"counts": {}, "untrained": {}, "ledger_dropped": 0, "ledger_error": None}
    return dict(status_rows(stats))


@pytest.mark.parametrize(
    ("collected", "text"),
    [
        (5, "in 4 steps"),
        (4, "in 3 steps, and the one being collected"),
        (3, "in 2 steps, and 2 that are not finished"),
    ],
)
def test_the_number_of_steps_is_that_of_the_row_step_also_if_the_ledger_is_ahead(
    collected: int, text: str
) -> None:
    rows = rows_while_collecting(collected)
    assert rows["step"] == str(collected) and rows["policy mean"] == f"0.50 → 0.50 {text}"


@pytest.mark.parametrize(
    ("collected", "text"),
    [
        (5, "in 1 step"),
        (4, "in 0 steps, and the one being collected"),
        (3, "in 0 steps, and the one being collected"),
    ],
)
def test_unfinished_steps_before_a_change_of_the_hooks_are_not_subtracted_from_those_after_it(
    collected: int, text: str
) -> None:
    rows = rows_while_collecting(collected, change_at=4)
    assert rows["curve"].startswith("begins at step 4: the hooks changed. The 3 steps before")
    assert rows["policy mean"] == f"0.50 → 0.50 {text}"


def test_the_ends_of_a_curve_are_means_of_groups_and_not_of_steps() -> None:
    curve = [{"step": 1, "policy_mean": 0.25, "returned_best": None, "groups": 40}]
    curve += [
        {"step": at, "policy_mean": 0.75, "returned_best": None, "groups": 8} for at in (2, 3)
    ]
    curve += [{"step": 9, "policy_mean": 0.0, "returned_best": None, "groups": 1}]
    stats = {"curve": curve, "run_id": "r", "other_runs": [], "engine": None, "paused": False}
    stats |= {"counts": {}, "untrained": {}, "ledger_dropped": 0, "ledger_error": None}
    rows = dict(status_rows(stats))
    shown = (0.75 * 16 + 0.25 * 40) / 57
    assert rows["policy mean"] == f"0.25 → {shown:.2f} in 4 steps"
    assert "start it (`fakevllm-server start`)" in rows["engine"]


async def test_task_keys_are_signed_and_those_from_before_the_key_file_are_refused(
    tmp_path: Path,
) -> None:
    key_file = tmp_path / "of-apps"
    key_file.write_text("sk-one\n")
    issued_keys: set[str] = set()
    bearer = {"Authorization": "Bearer sk-one"}
    for keys in (None, key_file, key_file):  # the same after a restart
        flags = {} if keys is None else {"key_file": keys}
        async with open_client(tmp_path, **flags) as (proxy, client):
            known = [key for key in issued_keys if proxy.tasks.knows(key)]
            assert len(known) == len(issued_keys) // 2  # the key without an owner is refused
            reply = await client.post("/fakevllm/tasks", json=TASKS, headers=bearer)
            (key,) = reply.json()["keys"]
            assert proxy.tasks.knows(key)
            assert proxy.tasks.knows("sk-task-t1") is (keys is None)
            issued_keys.add(key)
    assert len(issued_keys) == 2
    assert all(key.startswith("sk-task-t1.") for key in issued_keys)


async def test_a_task_of_another_key_is_a_409_and_stays_also_after_a_restart(
    tmp_path: Path,
) -> None:
    key_file = tmp_path / "of-apps"
    key_file.write_text("sk-one\nsk-two\n")
    poison = {"tasks": [{"task_id": "new"}, {"task_id": "t1", "metadata": {"answer": "wrong"}}]}
    for _ in range(2):
        async with open_client(tmp_path, key_file=key_file) as (proxy, client):
            for key, body, status in (
                ("sk-one", TASKS, 200),
                ("sk-two", poison, 409),
                ("sk-two", TASKS, 409),
            ):
                bearer = {"Authorization": f"Bearer {key}"}
                reply = await client.post("/fakevllm/tasks", json=body, headers=bearer)
                assert reply.status_code == status
                if status == 409:
                    assert "another API key" in reply.json()["error"]["message"]
            assert proxy.tasks.by_id("t1") == Task(task_id="t1", main_query="hi")
            assert proxy.tasks.by_id("new") is None


def test_text_that_resembles_markup_is_shown_unchanged() -> None:
    console = Console(width=80, file=StringIO())
    console.print(as_table("here", [("engine detail", "take lr out of [job], and [/] too")]))
    assert isinstance(console.file, StringIO)
    assert "take lr out of [job], and [/] too" in console.file.getvalue()


async def test_the_status_shows_a_refusal_only_while_the_hook_files_differ(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (_, client):
        stats = (await client.get("/fakevllm/stats")).json()
    refused = {"state": "refused", "message": "they were not taken over"}
    stats["hooks"] = {"digest": "d", "since": 0.0, "num_versions": 1, "last_reload": refused}
    stats["hooks_changed"] = "The hook files changed on disk."
    assert dict(status_rows(stats))["last reload"] == "they were not taken over"
    stats["hooks_changed"] = None
    assert "last reload" not in dict(status_rows(stats))
