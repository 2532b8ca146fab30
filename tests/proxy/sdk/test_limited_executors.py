"""Executors that accept further calls only while few enough calls or groups wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from fakevllm.ajet import BoundedThreadPoolExecutor, TaskCountLimitedThreadPoolExecutor
from fakevllm.sdk.types import ClientClosed, SwarmServerOfflineError

TIMEOUT_S = 10.0
BLOCKED_S = 0.1
"""Seconds after which a call that has not returned counts as blocked."""


@contextmanager
def blocked(call: Callable[[], Any]) -> Generator[Future[Any]]:
    """Run a call that blocks in a thread. After the `with` block, wait until the call has ended."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised to the test by the future
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BLOCKED_S)
    assert thread.is_alive(), "the call did not block"
    yield future
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "the call still blocks"


class Gate:
    """Calls that begin and wait until the test opens the gate."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self._begun = threading.Semaphore(0)
        self.names: list[str] = []
        """Names of the calls that have begun."""

    def run(self, name: str) -> str:
        self.names.append(name)
        self._begun.release()
        assert self.open.wait(TIMEOUT_S)
        return name

    def wait_until_begun(self, num_calls: int) -> None:
        for _ in range(num_calls):
            assert self._begun.acquire(timeout=TIMEOUT_S)


def group(*names: str) -> list[dict[str, str]]:
    return [{"name": name} for name in names]


def test_a_call_is_accepted_when_the_full_queue_has_a_free_place_again() -> None:
    gate = Gate()
    executor = BoundedThreadPoolExecutor(max_workers=1, max_queue_size=1)
    running, queued = executor.submit(gate.run, "1"), executor.submit(gate.run, name="2")
    gate.wait_until_begun(1)
    with blocked(lambda: executor.submit(gate.run, "3")) as third:
        assert gate.names == ["1"]
        gate.open.set()
    assert third.result().result(TIMEOUT_S) == "3"
    assert (running.result(), queued.result()) == ("1", "2")
    executor.shutdown(wait=True)


def test_the_queue_of_a_bounded_executor_holds_100_calls() -> None:
    gate = Gate()
    executor = BoundedThreadPoolExecutor(2)
    futures = [executor.submit(gate.run, str(number)) for number in range(102)]
    with blocked(lambda: executor.submit(gate.run, "102")):
        gate.open.set()
    executor.shutdown()
    assert all(future.done() for future in futures) and len(gate.names) == 103


def test_an_error_of_a_bounded_call_is_in_its_future() -> None:
    executor = BoundedThreadPoolExecutor(1)
    with pytest.raises(ValueError, match="invalid literal"):
        executor.submit(int, "one").result(TIMEOUT_S)
    assert executor.submit(int, "1").result(TIMEOUT_S) == 1
    executor.shutdown()


def test_shutdown_without_waiting_returns_at_once_and_the_calls_end_later() -> None:
    gate = Gate()
    executor = BoundedThreadPoolExecutor(1)
    futures = [executor.submit(gate.run, name) for name in "12"]
    executor.shutdown(wait=False)
    assert not futures[0].done()
    gate.open.set()
    assert [future.result(TIMEOUT_S) for future in futures] == ["1", "2"]


@pytest.mark.parametrize("end", [SwarmServerOfflineError("stopped"), ClientClosed("closed")])
def test_a_final_error_ends_a_bounded_executor(end: Exception) -> None:
    executor = BoundedThreadPoolExecutor(1, max_queue_size=0)
    may_end = threading.Event()

    def fail() -> None:
        assert may_end.wait(TIMEOUT_S)
        raise end

    executor.submit(fail)
    with blocked(lambda: executor.submit(int, "1")) as waiting:
        may_end.set()
    with pytest.raises(type(end)):
        waiting.result()
    with pytest.raises(type(end)):
        executor.submit(int, "1")
    executor.shutdown()


def test_a_group_is_accepted_when_another_group_has_ended() -> None:
    first, second = Gate(), Gate()
    executor = TaskCountLimitedThreadPoolExecutor(max_parallel_groups=2, max_workers=8)
    one = executor.submit_group(task_id="1", fn=first.run, args_list=group("a", "b"))
    executor.submit_group(task_id="2", fn=second.run, args_list=group("c"))
    first.wait_until_begun(2)
    with blocked(lambda: executor.submit_group("3", second.run, group("d", "e"))) as third:
        assert "d" not in second.names
        first.open.set()
    assert [future.result(TIMEOUT_S) for future in one] == ["a", "b"]
    second.open.set()
    assert [future.result(TIMEOUT_S) for future in third.result()] == ["d", "e"]
    executor.shutdown()


def test_groups_that_run_during_a_weight_sync_do_not_delay_the_next_groups() -> None:
    gate = Gate()
    executor = TaskCountLimitedThreadPoolExecutor(max_parallel_groups=1, max_workers=8)
    slow = executor.submit_group("1", gate.run, group("slow"))
    with blocked(lambda: executor.submit_group("2", gate.run, group("next"))):
        executor.on_entering_weight_sync()
    gate.wait_until_begun(2)
    assert gate.names == ["slow", "next"] and not slow[0].done()
    with blocked(lambda: executor.submit_group("3", gate.run, group("last"))):
        gate.open.set()  # the group "slow" ends too, but its place is free already
    executor.shutdown()
    assert sorted(gate.names) == ["last", "next", "slow"]


def test_a_weight_sync_does_not_free_more_places_than_there_are() -> None:
    gate, closed = Gate(), Gate()
    executor = TaskCountLimitedThreadPoolExecutor(max_parallel_groups=1, max_workers=8)
    executor.submit_group("1", gate.run, group("1"))
    executor.on_entering_weight_sync()
    executor.on_entering_weight_sync()
    gate.open.set()
    executor.submit_group("2", closed.run, group("2"))
    with blocked(lambda: executor.submit_group("3", closed.run, group("3"))):
        closed.open.set()
    executor.shutdown()


def test_a_group_without_calls_needs_no_place() -> None:
    gate = Gate()
    executor = TaskCountLimitedThreadPoolExecutor(max_parallel_groups=1, max_workers=1)
    executor.submit_group("1", gate.run, group("1"))
    assert executor.submit_group("2", gate.run, []) == []
    gate.open.set()
    executor.shutdown()


def test_a_failed_call_of_a_group_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakevllm.sdk.episode_executors.FIRST_RETRY_S", 0.0)
    left = iter([ValueError("no"), None])

    def run(number: int) -> int:
        error = next(left)
        if error is not None:
            raise error
        return number

    executor = TaskCountLimitedThreadPoolExecutor(max_parallel_groups=1, max_workers=1)
    (future,) = executor.submit_group("1", run, [{"number": 3}])
    assert future.result(TIMEOUT_S) == 3
    executor.shutdown()


def test_without_retries_a_failed_call_is_logged_with_its_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = TaskCountLimitedThreadPoolExecutor(1, 1, auto_retry=False)
    futures = executor.submit_group("sums", int, [{"x": "one"}])  # int takes no keyword x
    executor.submit_group("more", dict, [{"a": 1}])
    executor.shutdown()
    assert isinstance(futures[0].exception(), TypeError)
    assert [record.getMessage() for record in caplog.records] == ["an episode of task sums failed"]


@pytest.mark.parametrize("end", [SwarmServerOfflineError("stopped"), ClientClosed("closed")])
def test_a_final_error_ends_an_executor_of_groups(
    end: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    may_end = threading.Event()
    begun: list[int] = []

    def run(number: int) -> None:
        begun.append(number)
        assert may_end.wait(TIMEOUT_S)
        raise end

    executor = TaskCountLimitedThreadPoolExecutor(max_parallel_groups=1, max_workers=1)
    executor.submit_group("1", run, [{"number": 0}, {"number": 1}])
    with blocked(lambda: executor.submit_group("2", run, [{"number": 2}])) as waiting:
        may_end.set()
    with pytest.raises(type(end)):
        waiting.result()
    with pytest.raises(type(end)):
        executor.submit_group("3", run, [{"number": 3}])
    with pytest.raises(type(end)):
        executor.shutdown()
    assert begun == [0] and not caplog.records


def test_the_first_call_of_the_first_group_may_run_alone() -> None:
    executor = TaskCountLimitedThreadPoolExecutor(2, 2, block_first_run=True)
    gate = Gate()
    gate.open.set()
    first, _ = executor.submit_group("1", gate.run, group("a", "b"))
    assert first.done()
    executor.shutdown()


def test_an_executor_without_places_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        TaskCountLimitedThreadPoolExecutor(max_parallel_groups=0, max_workers=1)
