"""GET /fakevllm/groups/ID: how an answer was made, without a word of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web
from fastapi import FastAPI

from fakevllm.config.model import load
from fakevllm.web.proxy_components import ProxyComponents, open_proxy
from fakevllm.web.routes import admin
from fakevllm_adapters.protocol.weights import WeightsReply
from tests.proxy.ledger.ledger_cases import call, group, trained
from tests.proxy.scripted_swarm import ScriptedSwarm

REQUEST = (
    '{"messages":[{"role":"user","content":"my secret"}],"temperature":0.5,"max_tokens":9,'
    '"stop":["my secret"],"seed":"my secret","stream":true}'
)
TEXTS = ("my secret", "answer 0", "answer 1", "1+1?", "0a1b2c3d")
WEIGHTS = WeightsReply(run_id="r", version=4, engine="embedded", digest="d" * 64, checkpoint_step=2)


@asynccontextmanager
async def open_client(
    folder: Path, **answers: Any
) -> AsyncGenerator[tuple[ProxyComponents, httpx.AsyncClient]]:
    """Run a proxy whose server gives these answers, and that has the group g1 with two siblings.
    The versions 3 and 4 sampled them."""
    async with ScriptedSwarm() as swarm:
        swarm.answers |= {f"/{name}": answer for name, answer in answers.items()}
        flags = {"proxy": {"run_dir": folder}, "swarm": {"url": swarm.url}}
        async with open_proxy(load(None, flags)) as proxy:
            await proxy.link.reached.wait()
            proxy.ledger.record(replace(group("g1"), request_json=REQUEST, served_by="best"))
            proxy.ledger.settle(
                "g1", "pooled", None, 1, [[call()], [call(replica="replica-1")]], "r", "job"
            )
            proxy.ledger.apply_log("r", [trained(1, "g1", step=2, advantages=(-0.5, 0.5))])
            app = FastAPI()
            app.include_router(admin.router(proxy))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
                yield proxy, client


async def test_a_receipt_tells_the_weights_the_siblings_and_the_step(tmp_path: Path) -> None:
    async with open_client(tmp_path, get_weights=WEIGHTS) as (_, client):
        reply = await client.get("/fakevllm/groups/g1")
    receipt = reply.json()
    assert reply.status_code == 200
    assert (receipt["engine"], receipt["model"], receipt["run_id"]) == ("embedded", "m", "r")
    assert receipt["weights"] == [
        {"version": 3, "digest": None, "checkpoint_step": None},
        {"version": 4, "digest": "d" * 64, "checkpoint_step": 2},
    ]
    assert (receipt["state"], receipt["trained_step"], receipt["trained_version"]) == (
        *("trained", 2, 2),
    )
    assert (receipt["hook_hash"], receipt["job_hash"]) == ("9f86d081884c7d65", "job")
    assert (receipt["received_at"], receipt["served_by"]) == (1000.0, "best")
    assert receipt["sampling"] == {"temperature": 0.5, "max_tokens": 9, "stream": True}
    assert [one["advantage"] for one in receipt["siblings"]] == [-0.5, 0.5]
    assert receipt["siblings"][0] == {
        **{"index": 0, "served": True, "best": True, "status": 200, "reward": 0.0},
        **{"finish_reason": "stop", "failure": None, "prompt_tokens": 5, "completion_tokens": 3},
        **{"trained": True, "advantage": -0.5, "temperature": 1.0, "untrainable": None},
        **{"weight_versions": [[3, 0, 1], [4, 1, 2]], "replica": None},
    }
    assert receipt["siblings"][1]["replica"] == "replica-1"


async def test_a_receipt_contains_no_text_and_no_fingerprint_of_a_key(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (_, client):
        body = (await client.get("/fakevllm/groups/g1")).text
    assert not [text for text in TEXTS if text in body]


async def test_a_receipt_comes_from_the_ledger_alone_if_the_server_does_not_help(
    tmp_path: Path,
) -> None:
    other_run = WEIGHTS.model_copy(update={"run_id": "another"})
    for number, answer in enumerate((404, "<html>", web.Response(status=503), other_run)):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with open_client(folder, get_weights=answer) as (_, client):
            receipt = (await client.get("/fakevllm/groups/g1")).json()
        assert receipt["engine"] is None
        assert [one["version"] for one in receipt["weights"]] == [3, 4]
        assert {one["digest"] for one in receipt["weights"]} == {None}


async def test_a_request_that_was_served_once_has_a_receipt_without_versions(
    tmp_path: Path,
) -> None:
    async with open_client(tmp_path, get_weights=WEIGHTS) as (proxy, client):
        served = replace(group("g2", [None]), state="served", reason="no_hooks", request_json="x")
        proxy.ledger.record(served)
        receipt = (await client.get("/fakevllm/groups/g2")).json()
    assert (receipt["state"], receipt["reason"]) == ("served", "no_hooks")
    assert (receipt["weights"], receipt["sampling"], receipt["engine"]) == ([], {}, None)
    assert receipt["siblings"][0]["weight_versions"] == []


async def test_an_unknown_id_gets_one_line_in_the_form_of_vllm(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (_, client):
        reply = await client.get("/fakevllm/groups/no%0Abody")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (404, 404, "NotFoundError")
    assert error["message"].startswith("Group 'no\\nbody' is not in the ledger")
    assert "\n" not in error["message"]
