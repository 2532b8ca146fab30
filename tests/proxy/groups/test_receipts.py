"""Headers with which an app finds the receipt of its answer. The tests use real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from fakevllm.transport import app_response
from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.backends.http.engine_server import create_app as engine_app
from fakevllm_server.backends.http.preparation import PreparationThreads
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.fuzz.in_process_stack import Reply, Stack, listening, running, swarm_over
from tests.proxy.groups.test_resend_cache import groups, settled
from tests.proxy.scripted_swarm import until

JSON = {"Content-Type": "application/json"}
GROUP, VERSION = "x-fakevllm-group", "x-fakevllm-version"


def sections(folder: Path, **serve: Any) -> dict[str, Any]:
    return {"hooks": write_hooks(folder / "hooks", PREFER_YES), "serve": serve}


async def send(
    stack: Stack, path: str = "/v1/chat/completions", headers: dict[str, str] = JSON, **fields: Any
) -> Reply:
    body = {"model": "fake", "messages": [{"role": "user", "content": "yes or no?"}], **fields}
    return await stack.send(stack.proxy + path, orjson.dumps(body), headers)


def serve_version(stack: Stack, version: int) -> None:
    assert stack.swarm.engine_client is not None
    stack.swarm.engine_client.endpoint.gate.version = version


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("policy", ["best", "lead"])
async def test_an_answer_names_its_group_and_the_version_of_the_weights(
    tmp_path: Path, policy: str, streamed: bool
) -> None:
    async with running(tmp_path, **sections(tmp_path, policy=policy)) as stack:
        serve_version(stack, 0)  # the fake engine reports this version with each token
        reply = await send(stack, stream=streamed)
        (row,) = await settled(tmp_path)
    assert (reply.status, reply.headers[GROUP], reply.headers[VERSION]) == (200, row[-1], "0")


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_version_comes_from_the_gate_if_the_engine_has_not_reported_it(
    tmp_path: Path, streamed: bool
) -> None:
    async with running(tmp_path) as stack:  # without hooks, a request is not captured
        serve_version(stack, 7)
        reply = await send(stack, stream=streamed)
    assert reply.headers[VERSION] == "7"


async def test_a_call_during_a_publish_names_no_version(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        assert stack.swarm.engine_client is not None
        with stack.swarm.engine_client.endpoint.gate.swap(8):
            reply = await send(stack)
            assert reply.status == 200 and VERSION not in reply.headers
        assert (await send(stack)).headers[VERSION] == "8"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "yes or no?"}),
        ("/v1/messages", {"max_tokens": 20}),
        ("/v1/completions", {"prompt": "yes or no?"}),
    ],
)
async def test_each_format_carries_both_headers(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        reply = await send(stack, path, **fields)
        (row,) = await settled(tmp_path)
    assert (reply.status, reply.headers[GROUP], reply.headers[VERSION]) == (200, row[-1], "0")


async def test_a_refused_request_names_its_group_and_no_version(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        reply = await send(stack, temperature=-1)
        (row,) = await settled(tmp_path)
    assert (reply.status, reply.headers[GROUP], row[0]) == (400, row[-1], "failed")
    assert VERSION not in reply.headers


async def test_a_resent_request_names_the_group_of_the_first_attempt(tmp_path: Path) -> None:
    keyed = JSON | {"idempotency-key": "k"}
    async with running(tmp_path, **sections(tmp_path)) as stack:
        first = await send(stack, headers=keyed)
        again = await send(stack, headers=keyed)
        (row,) = await settled(tmp_path)
    assert first.headers[GROUP] == again.headers[GROUP] == row[-1]
    assert first.headers[VERSION] == again.headers[VERSION]
    assert first.body == again.body


async def test_a_keep_alive_sends_the_headers_without_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_response, "GRACE_S", 0.01)
    slow = [{"role": "user", "content": "[[slow 0.05]] [[say yes]]"}]
    async with running(tmp_path, **sections(tmp_path)) as stack:
        reply = await send(stack, messages=slow, stream=True)
        (row,) = await settled(tmp_path)
    assert reply.headers[GROUP] == row[-1] and VERSION not in reply.headers


async def test_receipts_can_be_switched_off(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path, receipts=False)) as stack:
        cases: list[dict[str, Any]] = [{}, {"stream": True}, {"temperature": -1}]
        for fields in cases:
            headers = (await send(stack, **fields)).headers
            assert GROUP not in headers and VERSION not in headers


async def test_a_client_without_a_proxy_gets_no_version(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        body = orjson.dumps({"model": "fake", "messages": [{"role": "user", "content": "?"}]})
        reply = await stack.send(f"{stack.server}/v1/chat/completions", body, JSON)
    assert reply.status == 200 and VERSION not in reply.headers


async def test_the_header_leads_to_the_receipt_of_the_group(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        reply = await send(stack, temperature=0.5, stop=["secret"])
        await until(lambda: bool(groups(tmp_path)))
        url = f"{stack.proxy}/fakevllm/groups/{reply.headers[GROUP]}"
        async with stack.http.get(url) as answer:
            receipt = await answer.json()
    assert receipt["sampling"] == {"temperature": 0.5}
    served = receipt["siblings"][receipt["served_index"]]
    assert served["served"] and served["finish_reason"] == "stop"
    assert "yes" not in orjson.dumps(receipt["siblings"]).decode()


async def test_a_call_to_a_policy_names_the_version_of_the_policy(tmp_path: Path) -> None:
    engine, via = FakeEngine(), JSON | {"Via": "1.1 fakevllm"}
    await engine.export(tmp_path / "weights")
    await engine.load_policy("policy-3", tmp_path / "weights", 3)
    body = {"model": "policy-3", "messages": [{"role": "user", "content": "yes or no?"}]}
    async with (
        listening(engine_app(engine, engine, PreparationThreads(), engine)) as engine_url,
        swarm_over(tmp_path, engine_url) as (server_url, _),
        aiohttp.ClientSession() as http,
    ):
        url = f"{server_url}/v1/chat/completions"
        async with http.post(url, json=body, headers=via) as reply:
            assert (reply.status, reply.headers[VERSION]) == (200, "3")
        async with http.post(url, json=body | {"model": "policy-4"}, headers=via) as reply:
            assert reply.status == 404 and VERSION not in reply.headers
