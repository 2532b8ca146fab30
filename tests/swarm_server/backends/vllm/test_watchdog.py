"""When a vLLM is held to hang."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from fakevllm_server.backends.vllm import watchdog
from fakevllm_server.backends.vllm.control import Control
from fakevllm_server.backends.vllm.stand_in import Fault, StandIn
from fakevllm_server.backends.vllm.watchdog import (
    HEALTH_BOUND_S,
    TOKEN_BOUND_S,
    Look,
    Watchdog,
    progress_in,
    until_hung,
)


def look(
    at: float, *, healthy: bool = True, running: int = 1, moved: bool = False, paused: bool = False
) -> Look:
    return Look(at, healthy, running, moved, paused)


def test_an_api_that_does_not_answer_for_the_bound_hangs() -> None:
    dog = Watchdog(0)
    assert dog.verdict(look(HEALTH_BOUND_S, healthy=False)) is None
    assert "/health" in (dog.verdict(look(HEALTH_BOUND_S + 1, healthy=False)) or "")


def test_an_api_that_answers_now_and_then_does_not() -> None:
    dog = Watchdog(0)
    assert dog.verdict(look(HEALTH_BOUND_S, healthy=False)) is None
    assert dog.verdict(look(HEALTH_BOUND_S + 1)) is None
    assert dog.verdict(look(2 * HEALTH_BOUND_S, healthy=False)) is None


def test_an_engine_that_samples_nothing_while_calls_wait_hangs() -> None:
    dog = Watchdog(0)
    assert dog.verdict(look(TOKEN_BOUND_S)) is None
    how = dog.verdict(look(TOKEN_BOUND_S + 1, running=3))
    assert how == "has sampled nothing for 301 s, with 3 calls waiting"


@pytest.mark.parametrize("sign", [{"moved": True}, {"running": 0}, {"paused": True}])
def test_one_that_moves_or_has_nothing_to_do_or_takes_weights_does_not(sign: dict) -> None:
    dog = Watchdog(0)
    assert dog.verdict(look(TOKEN_BOUND_S)) is None
    assert dog.verdict(look(TOKEN_BOUND_S + 1, **sign)) is None
    assert dog.verdict(look(2 * TOKEN_BOUND_S + 1)) is None


def test_the_bound_begins_with_the_first_waiting_call() -> None:
    dog = Watchdog(0)
    assert dog.verdict(look(10 * TOKEN_BOUND_S, running=0)) is None
    assert dog.verdict(look(11 * TOKEN_BOUND_S)) is None


def test_the_counters_of_all_engines_are_added() -> None:
    metrics = (
        b"# HELP vllm:generation_tokens_total x\n"
        b'vllm:generation_tokens_total{engine="0"} 12.0\n'
        b'vllm:generation_tokens_total{engine="1"} 3.0\n'
        b'vllm:iteration_tokens_total_count{engine="0"} 5.0\n'
        b'vllm:prompt_tokens_total{engine="0"} 100.0\n'
    )
    assert progress_in(metrics) == 20.0
    assert progress_in(b"") is None


async def test_an_engine_without_counters_is_asked_for_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(watchdog, "TOKEN_BOUND_S", 0.3)
    engine = StandIn(tmp_path)
    looks = iter([1] * 200)

    def num_running() -> int:
        if next(looks, None) is None:
            engine.faults.add(Fault.SAMPLES_NOTHING)
        return 1

    async with TestServer(engine.app()) as server:
        control = Control(str(server.make_url("/")), None, {})
        try:
            how = await until_hung(control, num_running, lambda: False)
        finally:
            await control.close()
    # It was fine for all of the first looks, far longer than the bound.
    assert next(looks, None) is None
    assert how.startswith("has sampled nothing")


async def test_an_api_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(watchdog, "HEALTH_BOUND_S", 0.05)
    control = Control("http://engine", tmp_path / "nobody", {})
    assert "/health" in await until_hung(control, lambda: 0, lambda: False)
    await control.close()
