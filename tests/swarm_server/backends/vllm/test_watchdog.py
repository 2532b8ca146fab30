"""The conditions under which a vLLM counts as hung."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from fakevllm_server.backends.vllm import watchdog
from fakevllm_server.backends.vllm.control_client import ControlClient
from fakevllm_server.backends.vllm.simulated_vllm import Fault, SimulatedVllm
from fakevllm_server.backends.vllm.watchdog import (
    HEALTH_BOUND_S,
    TOKEN_BOUND_S,
    Observation,
    Watchdog,
    sum_progress_counters,
    wait_until_hung,
)


def observed(
    at: float, *, healthy: bool = True, running: int = 1, moved: bool = False, paused: bool = False
) -> Observation:
    return Observation(at, healthy, running, moved, paused)


def test_an_api_that_does_not_respond_within_the_bound_hangs() -> None:
    watchdog = Watchdog(0)
    assert watchdog.observe(observed(HEALTH_BOUND_S, healthy=False)) is None
    assert "/health" in (watchdog.observe(observed(HEALTH_BOUND_S + 1, healthy=False)) or "")


def test_an_api_that_responds_now_and_then_does_not_hang() -> None:
    watchdog = Watchdog(0)
    assert watchdog.observe(observed(HEALTH_BOUND_S, healthy=False)) is None
    assert watchdog.observe(observed(HEALTH_BOUND_S + 1)) is None
    assert watchdog.observe(observed(2 * HEALTH_BOUND_S, healthy=False)) is None


def test_an_engine_that_samples_nothing_while_calls_wait_hangs() -> None:
    watchdog = Watchdog(0)
    assert watchdog.observe(observed(TOKEN_BOUND_S)) is None
    problem = watchdog.observe(observed(TOKEN_BOUND_S + 1, running=3))
    assert problem == "has sampled nothing for 301 s, with 3 calls waiting"


@pytest.mark.parametrize("change", [{"moved": True}, {"running": 0}, {"paused": True}])
def test_an_engine_that_progresses_or_is_idle_or_takes_weights_does_not_hang(change: dict) -> None:
    watchdog = Watchdog(0)
    assert watchdog.observe(observed(TOKEN_BOUND_S)) is None
    assert watchdog.observe(observed(TOKEN_BOUND_S + 1, **change)) is None
    assert watchdog.observe(observed(2 * TOKEN_BOUND_S + 1)) is None


def test_the_bound_starts_with_the_first_waiting_call() -> None:
    watchdog = Watchdog(0)
    assert watchdog.observe(observed(10 * TOKEN_BOUND_S, running=0)) is None
    assert watchdog.observe(observed(11 * TOKEN_BOUND_S)) is None


def test_the_counters_of_all_engines_are_added() -> None:
    metrics = (
        b"# HELP vllm:generation_tokens_total x\n"
        b'vllm:generation_tokens_total{engine="0"} 12.0\n'
        b'vllm:generation_tokens_total{engine="1"} 3.0\n'
        b'vllm:iteration_tokens_total_count{engine="0"} 5.0\n'
        b'vllm:prompt_tokens_total{engine="0"} 100.0\n'
    )
    assert sum_progress_counters(metrics) == 20.0
    assert sum_progress_counters(b"") is None


async def test_an_engine_without_counters_is_tested_with_a_completion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "TOKEN_BOUND_S", 0.3)
    engine = SimulatedVllm(tmp_path)
    observations = iter([1] * 200)

    def num_running() -> int:
        if next(observations, None) is None:
            engine.faults.add(Fault.SAMPLES_NOTHING)
        return 1

    async with TestServer(engine.app()) as server:
        control = ControlClient(str(server.make_url("/")), None, {})
        try:
            problem = await wait_until_hung(control, num_running, lambda: False)
        finally:
            await control.close()
    # The engine was healthy in the first 200 observations, for far longer than the bound.
    assert next(observations, None) is None
    assert problem.startswith("has sampled nothing")


async def test_an_api_that_cannot_be_reached_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "HEALTH_BOUND_S", 0.05)
    control = ControlClient("http://engine", tmp_path / "nobody", {})
    assert "/health" in await wait_until_hung(control, lambda: 0, lambda: False)
    await control.close()
