"""Serve policies with a real swarm server: the app's answer, and no episode left open."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from fakevllm.transport import app_response
from fakevllm_adapters.formats.registry import ADAPTERS
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.fuzz.in_process_stack import Stack, running
from tests.fuzz.test_answers import LAST_BYTES, REQUESTS
from tests.proxy.scripted_swarm import until

TAKEN = ("pooled", None)
"""State and reason of a group that the server has accepted. The group waits, because the server's
engine trains nothing yet."""
JSON = {"Content-Type": "application/json"}
CHAT = "/v1/chat/completions"
GROUP = "SELECT state, reason, num_siblings, served_index, served_by, cut, status FROM groups"


def chat(text: str = "yes or no?", **more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **more}


def groups(folder: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "proxy" / "ledger.sqlite")) as ledger:
        return ledger.execute(f"{GROUP} ORDER BY received_at").fetchall()


async def settled(stack: Stack, folder: Path, num: int = 1) -> list[tuple[Any, ...]]:
    """Wait until `num` groups have been sent to the server; return their rows."""
    waiting = {"scored"}
    await until(lambda: len(groups(folder)) == num)
    await until(lambda: not waiting & {row[0] for row in groups(folder)})
    await until(lambda: stack.swarm.pool.num_open == 0)
    return groups(folder)


def policy(folder: Path, num: int = 3, **serve: Any) -> dict[str, Any]:
    hooks = write_hooks(folder / "hooks", PREFER_YES)
    return {"hooks": hooks, "job": {"num_repeat": num}, "serve": serve}


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("kind", ["lead", "greedy"])
async def test_a_leads_stream_is_complete_in_every_format_and_its_group_is_trained(
    tmp_path: Path, name: str, kind: str
) -> None:
    async with running(tmp_path, **policy(tmp_path, policy=kind)) as stack:
        body = orjson.dumps(REQUESTS[name] | {"stream": True})
        got = await stack.send(stack.proxy + ADAPTERS[name].path, body, JSON)
        assert got.status == 200 and got.body.endswith(LAST_BYTES[name])
        (row,) = await settled(stack, tmp_path)
    num = 4 if kind == "greedy" else 3
    assert row == (*TAKEN, num, 0, kind, None, 200)


async def test_a_greedy_lead_is_scored_and_never_trained(tmp_path: Path) -> None:
    async with running(tmp_path, **policy(tmp_path, policy="greedy")) as stack:
        for _ in range(2):
            got = await stack.send(stack.proxy + CHAT, orjson.dumps(chat(temperature=0.7)), JSON)
            # theta is below 0: the likeliest word is no.
            assert got.json["choices"][0]["message"]["content"] == "no."
        assert {row[:2] for row in await settled(stack, tmp_path, 2)} == {TAKEN}
    with closing(sqlite3.connect(tmp_path / "proxy" / "ledger.sqlite")) as ledger:
        calls = ledger.execute("SELECT sibling, untrainable IS NULL FROM calls").fetchall()
        leads = ledger.execute('SELECT reward FROM siblings WHERE "index" = 0').fetchall()
    assert sorted(calls) == sorted([(0, 0), (1, 1), (2, 1), (3, 1)] * 2)
    assert leads == [(0.0,), (0.0,)]


@pytest.mark.parametrize(("leaves", "state"), [("cancel", "failed"), ("finish", "pooled")])
@pytest.mark.parametrize("kind", ["best", "lead"])
async def test_a_disconnect_leaves_no_episode_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, leaves: str, state: str
) -> None:
    monkeypatch.setattr(app_response, "GRACE_S", 0.01)
    sections = policy(tmp_path, policy=kind, on_disconnect=leaves)
    slow = chat("[[slow 0.05]] [[say " + "a" * 20 + "]]", stream=True)
    async with running(tmp_path, **sections) as stack:
        async with stack.http.post(stack.proxy + CHAT, json=slow, headers=JSON) as answer:
            await answer.content.readany()
            answer.close()
        (row,) = await settled(stack, tmp_path)
    assert row[0] == state and row[6] == 499


async def test_siblings_beyond_the_limit_are_not_sent_and_the_ledger_records_it(
    tmp_path: Path,
) -> None:
    sections = policy(tmp_path, 4, max_siblings_in_flight=4)
    slow = orjson.dumps(chat("[[slow 0.05]] [[say " + "a" * 20 + "]]"))
    async with running(tmp_path, **sections) as stack:
        requests = [stack.send(stack.proxy + CHAT, slow, JSON) for _ in range(3)]
        assert [reply.status for reply in await asyncio.gather(*requests)] == [200] * 3
        rows = await settled(stack, tmp_path, 3)
        assert (await stack.http.get(stack.proxy + "/metrics")).status == 200
    assert [row[2] for row in rows] == [4, 2, 1]
    assert [row[5] for row in rows] == [None, "siblings_in_flight: 1 of 3 fit", None]
    assert rows[2][:2] == ("served", "siblings_in_flight: 0 of 3 fit")


async def test_the_reward_of_served_answers_and_the_policys_mean_are_reported_separately(
    tmp_path: Path,
) -> None:
    sections = policy(tmp_path, 8, random_fraction=0.5)
    async with running(tmp_path, **sections) as stack:
        for number in range(12):
            await stack.send(stack.proxy + CHAT, orjson.dumps(chat(f"{number}: yes or no?")), JSON)
        rows = await settled(stack, tmp_path, 12)
        async with stack.http.get(stack.proxy + "/fakevllm/stats") as reply:
            (point,) = (await reply.json())["curve"]
        async with stack.http.get(stack.proxy + "/metrics") as reply:
            metrics = await reply.text()
    assert {row[4] for row in rows} == {"best", "random"}
    assert point["returned_best"] > point["policy_mean"]
    assert point["returned_random"] is not None
    assert 'fakevllm_reward_count{route="/v1/chat/completions",series="policy"} 96.0' in metrics
