"""vLLM as a child of the server, played by the stand-in."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from swarm_server.backends.vllm.processes import api_process, running
from swarm_server.backends.vllm.rollouts import said

from fakevllm_server.backends.vllm import rollout, watchdog
from fakevllm_server.backends.vllm.command import Install
from fakevllm_server.backends.vllm.control import Control
from fakevllm_server.backends.vllm.rollout import VllmRollout, find_install
from fakevllm_server.backends.vllm.stand_in import Fault
from fakevllm_server.types.backend import BackendError, BackendRefused
from fakevllm_server.types.weight_gate import GateAbandoned

pytestmark = pytest.mark.usefixtures("no_waiting")


async def test_a_child_serves_takes_weights_and_leaves_nothing(
    child: Callable[..., VllmRollout], weights: Path
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    assert endpoint.refusal is None and endpoint.socket is not None
    assert endpoint.socket.stat().st_mode & 0o077 == 0
    await vllm.load_weights(weights, 1)
    assert await said(endpoint) == "trained"
    await vllm.close()
    assert not endpoint.socket.exists()


@pytest.mark.parametrize("fault", [Fault.RELOADS_FAIL, Fault.DIES_IN_RELOAD])
async def test_a_child_with_half_loaded_weights_is_ended_and_a_new_one_serves(
    child: Callable[..., VllmRollout], weights: Path, fault: Fault
) -> None:
    vllm = child(fault)
    first = await vllm.launch()
    with pytest.raises(BackendError, match="was ended"):
        await vllm.load_weights(weights, 1)
    assert not await vllm.health()
    second = await vllm.launch()
    assert second.gate is not first.gate
    assert await said(second) == "untrained"


async def test_who_waits_for_a_closed_engine_goes_to_the_next(
    child: Callable[..., VllmRollout],
) -> None:
    vllm = child()
    first = await vllm.launch()
    changing = first.gate.change(1, bound_s=0)
    await changing.__aenter__()
    waiting = asyncio.create_task(said(first))
    await vllm.close()
    with pytest.raises(GateAbandoned):
        await waiting
    assert await said(await vllm.launch()) == "untrained"
    with pytest.raises(GateAbandoned):
        await said(first)


async def test_a_close_that_is_cut_off_leaves_no_engine(
    child: Callable[..., VllmRollout],
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    assert endpoint.socket is not None
    engine = api_process(endpoint.socket)
    closing = asyncio.create_task(vllm.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await vllm.close()
    assert engine.pid not in {process.pid for process in running()}
    assert not endpoint.socket.exists() and not await vllm.health()


async def test_a_look_for_its_loss_that_is_cut_off_ends_a_hung_engine_all_the_same(
    child: Callable[..., VllmRollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    assert endpoint.socket is not None
    engine = api_process(endpoint.socket)
    ending = asyncio.Event()

    async def hangs(*_: object) -> str:
        ending.set()
        return "hangs"

    monkeypatch.setattr(rollout, "until_hung", hangs)
    lost = asyncio.create_task(vllm.lost())
    await ending.wait()
    while not lost.done() and await vllm.health():
        await asyncio.sleep(0)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    await vllm.close()
    assert engine.pid not in {process.pid for process in running()}


async def test_a_killed_child_is_lost_and_can_be_started_again(
    child: Callable[..., VllmRollout],
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    lost = asyncio.create_task(vllm.lost())
    assert endpoint.socket is not None
    os.kill(api_process(endpoint.socket).pid, signal.SIGKILL)
    assert await lost == "vLLM exited with code 137 (killed: out of memory?); see engine.log"
    assert not await vllm.health()
    assert await said(await vllm.launch()) == "untrained"


async def test_a_child_that_hangs_is_told_and_ended(
    child: Callable[..., VllmRollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(watchdog, "TOKEN_BOUND_S", 0.2)
    control = Control(endpoint.url, endpoint.socket, {})
    assert (await control.post("/pause?mode=keep")).is_ok
    await control.close()
    calling = asyncio.create_task(said(endpoint))
    assert (await vllm.lost()).startswith("vLLM has sampled nothing for 0 s, with 1 call")
    assert not await vllm.health()
    with pytest.raises(aiohttp.ClientError):
        await calling


async def test_arguments_that_vllm_does_not_take_are_the_users_to_mend(
    child: Callable[..., VllmRollout],
) -> None:
    with pytest.raises(BackendRefused, match=r"exited with code 2: .*no-such-fault"):
        await child("no-such-fault").launch()


def test_without_vllm_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(BackendRefused, match=r"pip install -e '\.\[vllm\]'.*make_environment\.sh"):
        find_install()


async def test_an_untried_version_is_told_and_started_all_the_same(
    child: Callable[..., VllmRollout],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rollout, "find_install", lambda: Install("0.40.0"))
    await child().launch()
    assert "0.40.0 is untried: known are >=0.24,<0.32" in caplog.text
