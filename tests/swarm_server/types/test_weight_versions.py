"""Weight versions that calls are stamped with, and the order of calls and changes of weights."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from fakevllm_server.types.weight_versions import CallStamp, GateAbandoned, WeightGate


async def started_call(gate: WeightGate) -> asyncio.Task[CallStamp]:
    """Start a call and let it run until it waits or ends."""

    async def call() -> CallStamp:
        async with gate.call() as stamp:
            return stamp

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    return task


async def test_a_call_is_stamped_with_the_version_that_samples_it() -> None:
    gate = WeightGate(3)
    async with gate.call() as stamp:
        assert gate.num_running == 1
    assert stamp.versions == [3] and gate.num_running == 0


async def test_a_new_adapter_answers_new_calls_and_the_gate_stays_open() -> None:
    gate = WeightGate(3)
    async with gate.call() as old:
        gate.serve_adapter("policy-4", 4)
        async with gate.call() as new:
            assert gate.running == {old, new}
        assert (old.versions, new.versions) == ([3, 4], [4])
        assert (old.known_version, new.known_version) == (None, 4)
    assert (gate.adapter, gate.version, gate.running) == ("policy-4", 4, frozenset())


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


async def test_a_call_that_arrives_during_a_change_waits_and_gets_the_new_weights() -> None:
    gate = WeightGate()
    async with gate.change(1, bound_s=10):
        task = await started_call(gate)
        assert not task.done()
    assert (await task).versions == [1]


async def test_a_call_that_outlasts_the_time_limit_is_stamped_with_both_versions() -> None:
    gate = WeightGate()
    async with gate.call() as stamp, gate.change(1, bound_s=0):
        assert stamp.versions == [0, 1], "the call may end while the weights still change"
    assert not stamp.is_doubtful


async def test_a_failed_change_leaves_the_gate_closed_and_marks_running_calls_doubtful() -> None:
    gate = WeightGate()
    async with gate.call() as stamp:
        with pytest.raises(RuntimeError):
            async with gate.change(1, bound_s=0):
                raise RuntimeError
    assert stamp.is_doubtful and gate.version == 0
    task = await started_call(gate)
    assert not task.done()
    async with gate.change(1, bound_s=0):
        pass
    assert (await task).versions == [1]


async def test_a_change_cancelled_while_it_waits_for_calls_changes_nothing() -> None:
    gate = WeightGate()

    async def change() -> None:
        async with gate.change(1, bound_s=10):
            raise AssertionError("a call still runs")

    async with gate.call() as stamp:
        changing = asyncio.create_task(change())
        await asyncio.sleep(0)
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        assert (await (await started_call(gate))).versions == [0]
    assert stamp.versions == [0] and not stamp.is_doubtful


async def test_a_change_whose_preparation_fails_changes_nothing() -> None:
    gate = WeightGate()

    async def fail() -> None:
        raise RuntimeError

    async with gate.call() as stamp:
        with pytest.raises(RuntimeError):
            async with gate.change(1, 0, prepare=fail):
                raise AssertionError("the preparation failed, so the change must not start")
    assert stamp.versions == [0] and not stamp.is_doubtful
    assert (await (await started_call(gate))).versions == [0]


async def test_a_change_whose_preparation_fails_does_not_open_a_closed_gate() -> None:
    gate = WeightGate()

    async def fail() -> None:
        raise RuntimeError

    for prepare in (None, fail):
        with pytest.raises(RuntimeError):
            async with gate.change(1, 0, prepare):
                raise RuntimeError
    task = await started_call(gate)
    assert not task.done()
    task.cancel()


async def test_retries_at_an_abandoned_gate_let_other_tasks_run() -> None:
    gate = WeightGate()
    gate.abandon()
    is_over = False

    async def retry() -> None:
        while not is_over:
            with contextlib.suppress(GateAbandoned):
                async with gate.call():
                    raise AssertionError("the engine is gone")

    retries = asyncio.create_task(retry())
    await asyncio.sleep(0)
    is_over = True
    await retries


async def test_no_call_waits_at_the_gate_of_an_engine_that_is_gone() -> None:
    gate = WeightGate()
    with pytest.raises(RuntimeError):
        async with gate.change(1, bound_s=0):
            raise RuntimeError
    task = await started_call(gate)
    gate.abandon()
    with pytest.raises(GateAbandoned):
        await task
    with pytest.raises(GateAbandoned):
        await (await started_call(gate))


async def test_new_weights_wait_for_running_calls_and_new_calls_get_only_new_weights() -> None:
    gate = WeightGate()

    async def publish() -> None:
        async with gate.drained(10):
            with gate.swap(1):
                assert gate.num_running == 0

    async with gate.call() as before:
        publishing = asyncio.create_task(publish())
        during = await started_call(gate)
        assert not during.done() and gate.version == 0
    await publishing
    assert (before.known_version, (await during).known_version) == (0, 1)


async def test_a_call_that_outlasts_the_bound_does_not_stop_new_weights() -> None:
    gate = WeightGate()
    async with gate.call() as stamp, gate.drained(0):
        gate.serve_adapter("policy-1", 1)
    assert (stamp.versions, stamp.known_version) == ([0, 1], None)
    assert (await started_call(gate)).done()


async def test_without_a_bound_new_weights_do_not_wait_and_calls_begin_meanwhile() -> None:
    gate = WeightGate()
    async with gate.call(), gate.drained(None):
        assert (await started_call(gate)).done()


async def test_a_gate_that_a_failed_change_has_closed_stays_closed_after_a_wait() -> None:
    gate = WeightGate()
    with contextlib.suppress(RuntimeError):
        async with gate.change(1, bound_s=0):
            raise RuntimeError
    async with gate.drained(10):
        pass
    task = await started_call(gate)
    assert not task.done()
    gate.abandon()
    with pytest.raises(GateAbandoned):
        await task


async def test_held_calls_pass_after_a_release_with_the_old_weights() -> None:
    gate = WeightGate(3)
    await gate.hold(bound_s=0)
    waiting = asyncio.create_task(_version_of_call(gate))
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.release()
    assert await waiting == [3]


async def test_held_calls_pass_after_a_change_with_the_new_weights() -> None:
    gate = WeightGate(3)
    await gate.hold(bound_s=0)
    waiting = asyncio.create_task(_version_of_call(gate))
    await asyncio.sleep(0)
    async with gate.change(4, bound_s=0):
        assert not waiting.done()
    assert await waiting == [4]


async def test_a_hold_waits_for_running_calls_but_not_forever() -> None:
    gate = WeightGate()
    async with gate.call() as stamp:
        await gate.hold(bound_s=0)
        async with gate.change(1, bound_s=0):
            pass
    assert stamp.versions == [0, 1]


async def _version_of_call(gate: WeightGate) -> list[int]:
    async with gate.call() as stamp:
        return stamp.versions
