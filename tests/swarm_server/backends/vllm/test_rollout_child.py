"""vLLM as a child process of the server, which is simulated."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from swarm_server.backends.vllm.processes import api_process, living_processes
from swarm_server.backends.vllm.rollouts import complete

from fakevllm_server.backends.vllm import rollout, watchdog
from fakevllm_server.backends.vllm.command import Install
from fakevllm_server.backends.vllm.control_client import ControlClient
from fakevllm_server.backends.vllm.rollout import VllmRollout, find_install
from fakevllm_server.backends.vllm.simulated_vllm import Fault
from fakevllm_server.types.backend import BackendError, BackendRefused
from fakevllm_server.types.weight_versions import GateAbandoned

pytestmark = pytest.mark.usefixtures("short_drain")


async def test_a_child_serves_takes_weights_and_removes_its_socket(
    child: Callable[..., VllmRollout], weights: Path
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    assert endpoint.refusal is None and endpoint.socket is not None
    assert endpoint.socket.stat().st_mode & 0o077 == 0
    await vllm.load_weights(weights, 1)
    assert await complete(endpoint) == "trained"
    await vllm.close()
    assert not endpoint.socket.exists()


@pytest.mark.parametrize("fault", [Fault.RELOADS_FAIL, Fault.DIES_IN_RELOAD])
async def test_a_child_with_half_loaded_weights_is_ended_and_a_new_child_serves(
    child: Callable[..., VllmRollout], weights: Path, fault: Fault
) -> None:
    vllm = child(fault)
    first = await vllm.launch()
    with pytest.raises(BackendError, match="was ended"):
        await vllm.load_weights(weights, 1)
    assert not await vllm.health()
    second = await vllm.launch()
    assert second.gate is not first.gate
    assert await complete(second) == "untrained"


async def test_a_call_that_waits_for_a_closed_engine_gets_gate_abandoned(
    child: Callable[..., VllmRollout],
) -> None:
    vllm = child()
    first = await vllm.launch()
    changing = first.gate.change(1, bound_s=0)
    await changing.__aenter__()
    waiting = asyncio.create_task(complete(first))
    await vllm.close()
    with pytest.raises(GateAbandoned):
        await waiting
    assert await complete(await vllm.launch()) == "untrained"
    with pytest.raises(GateAbandoned):
        await complete(first)


async def test_a_cancelled_close_leaves_no_engine(
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
    assert engine.pid not in {process.pid for process in living_processes()}
    assert not endpoint.socket.exists() and not await vllm.health()


async def test_a_hung_engine_is_ended_even_if_waiting_for_its_loss_is_cancelled(
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

    monkeypatch.setattr(rollout, "wait_until_hung", hangs)
    lost = asyncio.create_task(vllm.lost())
    await ending.wait()
    while not lost.done() and await vllm.health():
        await asyncio.sleep(0)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    await vllm.close()
    assert engine.pid not in {process.pid for process in living_processes()}


async def test_a_killed_child_is_lost_and_can_be_launched_again(
    child: Callable[..., VllmRollout],
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    lost = asyncio.create_task(vllm.lost())
    assert endpoint.socket is not None
    os.kill(api_process(endpoint.socket).pid, signal.SIGKILL)
    killed = r"vLLM exited with code 137 \(killed: out of memory\?\); see /.*/engine\.log"
    assert re.fullmatch(killed, await lost)
    assert not await vllm.health()
    assert await complete(await vllm.launch()) == "untrained"


async def test_a_child_that_hangs_is_reported_and_ended(
    child: Callable[..., VllmRollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    monkeypatch.setattr(watchdog, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "TOKEN_BOUND_S", 0.2)
    control = ControlClient(endpoint.url, endpoint.socket, {})
    assert (await control.post("/pause?mode=keep")).is_ok
    await control.close()
    calling = asyncio.create_task(complete(endpoint))
    assert (await vllm.lost()).startswith("vLLM has sampled nothing for 0 s, with 1 call")
    assert not await vllm.health()
    with pytest.raises(aiohttp.ClientError):
        await calling


async def test_an_argument_that_vllm_refuses_is_a_backend_refused_error(
    child: Callable[..., VllmRollout],
) -> None:
    with pytest.raises(BackendRefused, match=r"exited with code 2: .*no-such-fault"):
        await child("no-such-fault").launch()


def test_without_vllm_the_error_names_the_install_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(BackendRefused, match=r"pip install -e '\.\[vllm\]'.*make_environment\.sh"):
        find_install()


async def test_an_untested_version_is_logged_and_started(
    child: Callable[..., VllmRollout],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rollout, "find_install", lambda: Install("0.40.0"))
    await child().launch()
    assert "0.40.0 is untested; tested versions are >=0.24,<0.32" in caplog.text
