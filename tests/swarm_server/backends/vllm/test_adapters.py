"""A vLLM that holds each version as a LoRA adapter. The vLLM is simulated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from contract.rollouts import SentAnswer

from fakevllm_server.backends.vllm.adapters import CONFIG_FILE, Adapters, adapter_root
from fakevllm_server.backends.vllm.control_client import ControlClient
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.backends.vllm.simulated_vllm import WEIGHTS_FILE, Fault, SimulatedVllm
from fakevllm_server.rollout.engine_client import EngineClient
from fakevllm_server.types.backend import ActionFailed, BackendError, BackendRefused, Endpoint
from fakevllm_server.types.weight_versions import WeightGate

Child = Callable[..., VllmRollout]
Weights = Callable[..., Path]
RANK = 8


@pytest.fixture
def adapters(tmp_path: Path) -> Weights:
    """Write a folder with adapters, whose answers are a text."""

    def write(text: str, rank: int = RANK) -> Path:
        folder = tmp_path / f"exported {text}"
        folder.mkdir()
        (folder / CONFIG_FILE).write_text(json.dumps({"r": rank}))
        (folder / WEIGHTS_FILE).write_text(text)
        return folder

    return write


async def answer(endpoint: Endpoint, model: str | None = "simulated") -> tuple[str, str]:
    """Return the model's name and the content of an answer, through the server's client."""
    client, sent = EngineClient(endpoint), SentAnswer()
    body = {"messages": []} | ({} if model is None else {"model": model})
    try:
        async with endpoint.gate.call():
            await client.relay("POST", "/v1/chat/completions", orjson.dumps(body), {}, sent)
    finally:
        await client.close()
    reply = orjson.loads(sent.body)
    return reply["model"], reply["choices"][0]["message"]["content"]


def stored(folder: Path) -> list[str]:
    """Return the texts of the adapters whose files are kept for vLLM."""
    return sorted(file.read_text() for file in adapter_root(folder).glob(f"*/{WEIGHTS_FILE}"))


async def test_the_models_name_selects_the_newest_version_and_is_shown(
    child: Child, adapters: Weights, tmp_path: Path
) -> None:
    vllm = child(lora_rank=RANK)
    endpoint = await vllm.launch()
    assert endpoint.holds_policies and endpoint.takes_adapters and endpoint.refusal is None
    for version, text in enumerate(("zero", "one")):
        await vllm.load_weights(adapters(text), version)
        assert endpoint.gate.version == version
        for name in ("simulated", "", None):
            assert await answer(endpoint, name) == ("simulated", text)
    assert await answer(endpoint, "policy-1") == ("policy-1", "one")
    assert await vllm.policies() == {}
    await vllm.close()
    assert stored(tmp_path) == []


async def test_a_running_call_keeps_its_adapter_and_its_files(
    child: Child, adapters: Weights, tmp_path: Path
) -> None:
    vllm = child(lora_rank=RANK)
    endpoint = await vllm.launch()
    await vllm.load_weights(adapters("zero"), 0)
    async with endpoint.gate.call() as stamp:
        await vllm.load_weights(adapters("one"), 1)
        await vllm.load_weights(adapters("two"), 2)
        assert stamp.versions == [0, 1, 2] and stamp.known_version is None
        assert await answer(endpoint, "policy-0") == ("policy-0", "zero")
        assert "zero" in stored(tmp_path)
    await vllm.load_weights(adapters("three"), 3)
    await vllm.load_weights(adapters("four"), 4)
    assert stored(tmp_path) == ["four", "three"]
    assert await answer(endpoint, "policy-0") == ("policy-0", "untrained")  # an unknown name


async def test_policies_are_held_beside_the_served_version(
    child: Child, adapters: Weights, tmp_path: Path
) -> None:
    vllm = child(lora_rank=RANK)
    endpoint = await vllm.launch()
    await vllm.load_weights(adapters("one"), 1)
    await vllm.load_policy("policy-0", adapters("zero"), 0)
    await vllm.load_policy("policy-1", tmp_path, 1)  # it is served, so no file is read
    await vllm.load_weights(adapters("two"), 2)
    assert await vllm.policies() == {"policy-0": 0, "policy-1": 1}
    expected = {"policy-0": "zero", "policy-1": "one", "simulated": "two"}
    assert {name: (await answer(endpoint, name))[1] for name in expected} == expected
    with pytest.raises(ActionFailed, match="stands for version 1"):
        await vllm.load_policy("policy-1", tmp_path, 3)
    for name in ("policy-0", "policy-1", "policy-1"):
        await vllm.unload_policy(name)
    assert await vllm.policies() == {} and stored(tmp_path) == ["two"]


async def test_the_served_version_outlives_its_policy(child: Child, adapters: Weights) -> None:
    vllm = child(lora_rank=RANK)
    endpoint = await vllm.launch()
    await vllm.load_weights(adapters("one"), 1)
    await vllm.load_policy("policy-1", adapters("unused"), 1)
    await vllm.unload_policy("policy-1")
    assert await answer(endpoint) == ("simulated", "one")


async def test_after_a_restart_no_adapter_is_left_and_all_can_be_loaded_again(
    child: Child, adapters: Weights, tmp_path: Path
) -> None:
    vllm = child(lora_rank=RANK)
    await vllm.launch()
    one = adapters("one")
    await vllm.load_weights(one, 1)
    await vllm.load_policy("policy-0", adapters("zero"), 0)
    await vllm.close()
    with pytest.raises(BackendError, match="vLLM is not running"):
        await vllm.load_policy("policy-0", one, 0)
    endpoint = await vllm.launch()
    assert await vllm.policies() == {} and stored(tmp_path) == []
    await vllm.load_weights(one, 1)
    assert await answer(endpoint) == ("simulated", "one")


async def test_adapters_that_vllm_cannot_hold_are_refused_with_the_advice_to_merge_them(
    child: Child, adapters: Weights
) -> None:
    vllm = child(Fault.ADAPTERS_FAIL, lora_rank=RANK)
    await vllm.launch()
    with pytest.raises(BackendRefused, match=r"target modules.*leave --engine-arg=--enable-lora"):
        await vllm.load_weights(adapters("zero"), 0)
    with pytest.raises(ActionFailed, match="serves the model without adapters"):
        await vllm.load_policy("policy-1", adapters("one"), 1)


async def test_a_failed_load_after_a_restart_of_vllm_is_no_refusal(
    child: Child, adapters: Weights, tmp_path: Path
) -> None:
    vllm = child(lora_rank=RANK)
    await vllm.launch()
    await vllm.load_weights(adapters("one"), 1)
    await vllm.close()
    await vllm.launch()
    with pytest.raises(ActionFailed, match="has no LoRA adapters"):
        await vllm.load_weights(tmp_path / "nowhere", 1)


async def test_a_new_server_process_knows_whether_vllm_has_held_such_adapters(
    child: Child, adapters: Weights, tmp_path: Path
) -> None:
    vllm = child(lora_rank=RANK)
    await vllm.launch()
    await vllm.load_weights(adapters("one"), 1)
    await vllm.close()
    known, with_other_arguments = (
        child(lora_rank=RANK),
        child(lora_rank=RANK, arguments=["--enable-lora", "--seed=1"]),
    )
    for next_process, error in ((known, ActionFailed), (with_other_arguments, BackendRefused)):
        await next_process.launch()
        with pytest.raises(error, match="has no LoRA adapters"):
            await next_process.load_weights(tmp_path / "nowhere", 2)
        await next_process.close()


async def test_a_vllm_without_the_flag_gets_merged_weights_also_for_a_job_with_adapters(
    tmp_path: Path, child: Child, weights: Path
) -> None:
    vllm = child(lora_rank=RANK, arguments=["--no-enable-lora"])
    endpoint = await vllm.launch()
    assert not endpoint.holds_policies and not endpoint.takes_adapters
    await vllm.load_weights(weights, 1)
    assert endpoint.gate.adapter is None and await answer(endpoint) == ("simulated", "trained")
    with pytest.raises(BackendRefused, match="with --engine-arg=--enable-lora for a job with"):
        await vllm.load_policy("policy-0", tmp_path, 0)


async def test_the_files_of_a_policy_that_was_served_stay_for_its_newer_calls(
    child: Child, adapters: Weights, tmp_path: Path
) -> None:
    vllm = child(lora_rank=RANK)
    endpoint = await vllm.launch()
    await vllm.load_weights(adapters("one"), 1)
    async with AsyncExitStack() as newer:
        async with endpoint.gate.call():
            await vllm.load_weights(adapters("two"), 2)
            await vllm.load_policy("policy-1", tmp_path, 1)
            await newer.enter_async_context(endpoint.gate.call())
            await vllm.unload_policy("policy-1")
        await vllm.load_weights(adapters("three"), 3)
        assert "one" in stored(tmp_path)
        assert await answer(endpoint, "policy-1") == ("policy-1", "one")
    await vllm.load_weights(adapters("four"), 4)
    assert "one" not in stored(tmp_path)


async def test_an_adapter_that_vllm_did_not_unload_keeps_its_files_until_it_does(
    child: Child, adapters: Weights, tmp_path: Path
) -> None:
    vllm = child(Fault.ONE_UNLOAD_FAILS, lora_rank=RANK)
    endpoint = await vllm.launch()
    for version, text in enumerate(("zero", "one", "two")):
        await vllm.load_weights(adapters(text), version)
    assert "zero" in stored(tmp_path)
    assert await answer(endpoint, "policy-0") == ("policy-0", "zero")
    await vllm.load_weights(adapters("three"), 3)
    assert stored(tmp_path) == ["three", "two"]
    assert await answer(endpoint, "policy-0") == ("policy-0", "untrained")


async def test_a_policy_that_vllm_did_not_unload_is_still_a_policy(
    child: Child, adapters: Weights, tmp_path: Path
) -> None:
    vllm = child(Fault.ONE_UNLOAD_FAILS, lora_rank=RANK)
    endpoint = await vllm.launch()
    await vllm.load_weights(adapters("one"), 1)
    await vllm.load_policy("policy-0", adapters("zero"), 0)
    with pytest.raises(ActionFailed, match="did not unload policy-0: HTTP 500"):
        await vllm.unload_policy("policy-0")
    assert await vllm.policies() == {"policy-0": 0} and stored(tmp_path) == ["one", "zero"]
    assert await answer(endpoint, "policy-0") == ("policy-0", "zero")
    await vllm.unload_policy("policy-0")
    assert await vllm.policies() == {} and stored(tmp_path) == ["one"]


async def test_an_adapter_whose_reply_was_lost_is_loaded_once(
    child: Child, adapters: Weights
) -> None:
    vllm = child(Fault.ONE_ADAPTER_REPLY_IS_LOST, lora_rank=RANK)
    endpoint = await vllm.launch()
    await vllm.load_weights(adapters("one"), 1)
    assert await answer(endpoint) == ("simulated", "one")


async def test_a_name_that_vllm_holds_with_other_files_is_loaded_again(
    child: Child, adapters: Weights
) -> None:
    vllm = child(lora_rank=RANK)
    endpoint = await vllm.launch()
    body = {"lora_name": "policy-1", "lora_path": str(adapters("unfinished"))}
    client = ControlClient(endpoint.url, endpoint.socket, {})
    assert (await client.post("/v1/load_lora_adapter", body)).is_ok
    await client.close()
    await vllm.load_weights(adapters("one"), 1)
    assert await answer(endpoint) == ("simulated", "one")


class SlowToUnload(SimulatedVllm):
    """A simulated vLLM that unloads no adapter until the test allows it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_unloading, self.may_unload = asyncio.Event(), asyncio.Event()

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        self.is_unloading.set()
        await self.may_unload.wait()
        return await super()._unload_adapter(request)


async def test_a_change_that_is_cancelled_forgets_no_adapter(
    adapters: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    engine, gate = SlowToUnload(tmp_path), WeightGate()
    async with TestServer(engine.app()) as server:
        client = ControlClient(str(server.make_url("")), None, {})
        held = Adapters(client, gate, tmp_path, "simulated", RANK)
        async with gate.call():
            for version, text in enumerate(("zero", "one", "two")):
                await held.serve(adapters(text), version)
        change = asyncio.create_task(held.serve(adapters("three"), 3))
        await engine.is_unloading.wait()
        change.cancel()
        await asyncio.wait([change])
        assert change.cancelled()
        engine.may_unload.set()
        await held.serve(adapters("four"), 4)
        assert stored(tmp_path) == ["four", "two"] and set(engine.adapters) == {
            "policy-2",
            "policy-4",
        }
        await client.close()


async def test_after_a_failed_load_the_weights_before_it_are_served_on(
    child: Child, adapters: Weights, tmp_path: Path
) -> None:
    vllm = child(lora_rank=RANK)
    endpoint = await vllm.launch()
    await vllm.load_weights(adapters("one"), 1)
    for folder, problem in (
        (adapters("wide", rank=16), "have rank 16, and vLLM was started for 8"),
        (tmp_path / "nowhere", "has no LoRA adapters"),
    ):
        with pytest.raises(ActionFailed, match=problem):
            await vllm.load_weights(folder, 2)
        assert endpoint.gate.version == 1 and await answer(endpoint) == ("simulated", "one")
