"""Which versions a call is stamped with, and who waits for whom."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from fakevllm_server.types.weight_gate import CallStamp, GateAbandoned, WeightGate


async def waiting(gate: WeightGate) -> asyncio.Task[CallStamp]:
    """A call that has come as far as it can."""

    async def call() -> CallStamp:
        async with gate.call() as stamp:
            return stamp

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    return task


async def test_a_call_carries_the_version_it_was_sampled_by() -> None:
    gate = WeightGate(3)
    async with gate.call() as stamp:
        assert gate.num_running == 1
    assert stamp.versions == [3] and gate.num_running == 0


async def test_weights_change_only_when_no_call_runs() -> None:
    gate = WeightGate()
    order: list[str] = []

    async def change() -> None:
        async with gate.change(1, bound_s=10):
            order.append("changed")

    async with gate.call() as stamp:
        changing = asyncio.create_task(change())
        await asyncio.sleep(0)
        order.append("sampled")
    await changing
    assert order == ["sampled", "changed"] and stamp.versions == [0]


async def test_a_call_that_comes_during_a_change_waits_and_gets_the_new_weights() -> None:
    gate = WeightGate()
    async with gate.change(1, bound_s=10):
        task = await waiting(gate)
        assert not task.done()
    assert (await task).versions == [1]


async def test_a_call_that_outlasts_the_bound_carries_both_versions() -> None:
    gate = WeightGate()
    async with gate.call() as stamp, gate.change(1, bound_s=0):
        assert stamp.versions == [0, 1], "it may end while the weights still move"
    assert not stamp.is_doubtful


async def test_a_failed_change_leaves_the_gate_shut_and_running_calls_in_doubt() -> None:
    gate = WeightGate()
    async with gate.call() as stamp:
        with pytest.raises(RuntimeError):
            async with gate.change(1, bound_s=0):
                raise RuntimeError
    assert stamp.is_doubtful and gate.version == 0
    task = await waiting(gate)
    assert not task.done()
    async with gate.change(1, bound_s=0):
        pass
    assert (await task).versions == [1]


async def test_a_change_given_up_while_it_waits_for_calls_has_changed_nothing() -> None:
    gate = WeightGate()

    async def change() -> None:
        async with gate.change(1, bound_s=10):
            raise AssertionError("a call still runs")

    async with gate.call() as stamp:
        changing = asyncio.create_task(change())
        await asyncio.sleep(0)
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        assert (await (await waiting(gate))).versions == [0]
    assert stamp.versions == [0] and not stamp.is_doubtful


async def test_a_change_that_cannot_be_prepared_has_changed_nothing() -> None:
    gate = WeightGate()

    async def fail() -> None:
        raise RuntimeError

    async with gate.call() as stamp:
        with pytest.raises(RuntimeError):
            async with gate.change(1, 0, prepare=fail):
                raise AssertionError("it was not prepared")
    assert stamp.versions == [0] and not stamp.is_doubtful
    assert (await (await waiting(gate))).versions == [0]


async def test_a_change_that_cannot_be_prepared_opens_no_gate_that_was_shut() -> None:
    gate = WeightGate()

    async def fail() -> None:
        raise RuntimeError

    for prepare in (None, fail):
        with pytest.raises(RuntimeError):
            async with gate.change(1, 0, prepare):
                raise RuntimeError
    task = await waiting(gate)
    assert not task.done()
    task.cancel()


async def test_a_call_that_asks_an_abandoned_gate_again_and_again_lets_others_run() -> None:
    gate = WeightGate()
    gate.abandon()
    is_over = False

    async def ask() -> None:
        while not is_over:
            with contextlib.suppress(GateAbandoned):
                async with gate.call():
                    raise AssertionError("nobody answers there")

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    is_over = True
    await asking


async def test_nobody_waits_at_the_gate_of_an_engine_that_is_gone() -> None:
    gate = WeightGate()
    with pytest.raises(RuntimeError):
        async with gate.change(1, bound_s=0):
            raise RuntimeError
    task = await waiting(gate)
    gate.abandon()
    with pytest.raises(GateAbandoned):
        await task
    with pytest.raises(GateAbandoned):
        await (await waiting(gate))
