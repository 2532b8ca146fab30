"""Executors that run many episodes at once."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Generator

import pytest

from fakevllm import (
    PeriodicDrainThreadPoolExecutor,
    SwarmServerOfflineError,
    Task,
    run_episodes_until_all_complete,
)
from fakevllm.sdk.episode_executors import LOG_INTERVAL_S, Retrier
from fakevllm.sdk.types import ClientClosed

TASKS = [Task(task_id=str(number)) for number in range(6)]
TIMEOUT_S = 10.0


def test_all_tasks_run_at_once_and_results_are_in_the_order_of_the_tasks() -> None:
    all_there = threading.Barrier(len(TASKS), timeout=TIMEOUT_S)

    def run(task: Task) -> str:
        all_there.wait()
        return task.task_id

    assert run_episodes_until_all_complete(TASKS, run) == [task.task_id for task in TASKS]
    assert run_episodes_until_all_complete([], run) == []


def test_failures_are_retried_with_backoff_and_each_kind_is_logged_in_full_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pauses: list[float] = []
    left = iter([ValueError("no"), ValueError("no"), KeyError("yes, but"), None])

    def run() -> str:
        error = next(left)
        if error is not None:
            raise error
        return "done"

    clock = itertools.count(step=LOG_INTERVAL_S).__next__
    assert Retrier(pauses.append, clock=clock).wrap(run)() == "done"
    assert pauses == [0.5, 1.0, 2.0]
    assert [record.exc_info is not None for record in caplog.records] == [True, False, True]


def failing(*errors: Exception) -> Callable[[], None]:
    left = iter(errors)

    def run() -> None:
        for error in left:
            raise error

    return run


def test_repeated_failures_in_one_place_are_logged_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = [KeyError(f"episode {number:032x} of task {number}") for number in range(4)]
    clock = iter([0.0, 1.0, 2.0, LOG_INTERVAL_S]).__next__
    Retrier(lambda _: None, clock=clock).wrap(failing(*errors))()
    first, last = caplog.records
    assert first.exc_info is not None and last.exc_info is None
    assert "(2 more failed in the same place): KeyError" in last.getMessage()


def test_failures_are_grouped_by_traceback_and_not_by_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = iter(["one", "a second", "the third", "?"])

    def score() -> int:
        answer = next(answers)
        if answer == "?":
            return int(answer)  # another line, hence another kind of failure
        return int(answer)

    def run() -> None:
        with contextlib.suppress(StopIteration):
            score()

    Retrier(lambda _: None, clock=lambda: 0.0).wrap(run)()
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert "'one'" in caplog.messages[0] and "'?'" in caplog.messages[1]


def test_a_lost_connection_is_logged_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = RuntimeError("Connection error.")
    error.__cause__ = ConnectionRefusedError()
    Retrier(lambda _: None).wrap(failing(error))()
    (record,) = caplog.records
    assert record.exc_info is None and "RuntimeError: Connection error." in record.getMessage()


def test_a_stopped_engine_ends_the_retries() -> None:
    def run(_: Task) -> None:
        raise SwarmServerOfflineError("stopped")

    with pytest.raises(SwarmServerOfflineError):
        run_episodes_until_all_complete(TASKS[:1], run)


def test_without_retries_an_error_is_raised_to_the_caller() -> None:
    def run(_: Task) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_episodes_until_all_complete(TASKS[:1], run, auto_retry=False)


@contextlib.contextmanager
def joined_threads() -> Generator[None]:
    """Join the threads that were started inside the block."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_after_the_first_failure_no_further_task_begins() -> None:
    all_begun = threading.Barrier(4, timeout=TIMEOUT_S)
    begun: list[str] = []

    def run(task: Task) -> None:
        begun.append(task.task_id)
        all_begun.wait()
        raise ValueError("mine")

    tasks = [Task(task_id=str(number)) for number in range(100)]
    with joined_threads(), pytest.raises(ValueError, match="mine"):
        run_episodes_until_all_complete(tasks, run, max_workers=4, auto_retry=False)
    assert sorted(begun) == ["0", "1", "2", "3"]


def test_a_failure_is_raised_before_the_other_tasks_are_done() -> None:
    all_begun, may_end = threading.Barrier(2, timeout=TIMEOUT_S), threading.Event()

    def run(task: Task) -> None:
        all_begun.wait()
        if task is TASKS[1]:
            raise ValueError("mine")
        assert may_end.wait(TIMEOUT_S)

    with pytest.raises(ValueError, match="mine"):
        run_episodes_until_all_complete(TASKS[:2], run, auto_retry=False)
    may_end.set()


def interrupt() -> None:
    """Interrupt the main thread as Ctrl-C does."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_after_an_interrupt_no_further_task_begins() -> None:
    begun: list[str] = []
    may_end = threading.Event()

    def run(task: Task) -> None:
        begun.append(task.task_id)
        assert may_end.wait(TIMEOUT_S)

    with joined_threads():
        threading.Timer(0.05, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            run_episodes_until_all_complete(TASKS, run, max_workers=1)
        may_end.set()
    assert begun == ["0"]


def test_after_an_interrupt_no_window_continues() -> None:
    begun: list[int] = []
    may_end = threading.Event()

    def run(number: int) -> None:
        begun.append(number)
        assert may_end.wait(TIMEOUT_S)

    executor = PeriodicDrainThreadPoolExecutor(workers=2, max_parallel=1)
    with joined_threads():
        for number in range(2):
            executor.submit_with_periodic_drain(run, number)
        threading.Timer(0.05, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            executor.shutdown()
        may_end.set()
    assert begun == [0]


def test_a_failure_after_stop_is_not_retried() -> None:
    pauses: list[float] = []
    retrier = Retrier(pauses.append)
    retrier.stop()
    with pytest.raises(ValueError, match="late"):
        retrier.wrap(failing(ValueError("late")))()
    assert not pauses


@pytest.mark.parametrize("auto_retry", [True, False])
@pytest.mark.parametrize("end", [SwarmServerOfflineError("stopped"), ClientClosed("closed")])
def test_a_final_error_ends_the_executor_and_is_raised_by_each_method(
    end: Exception, auto_retry: bool, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[int] = []
    may_end = threading.Event()

    def run(number: int) -> None:
        begun.append(number)
        may_end.wait(TIMEOUT_S)
        raise end

    executor = PeriodicDrainThreadPoolExecutor(workers=2, max_parallel=1, auto_retry=auto_retry)
    executor.submit_with_periodic_drain(run, 0)
    executor.submit_with_periodic_drain(run, 1)
    may_end.set()
    with pytest.raises(type(end)):
        executor.submit_with_periodic_drain(run, 2)
    with pytest.raises(type(end)):
        executor.submit(run, 3)
    with pytest.raises(type(end)):
        executor.shutdown()
    assert begun == [0] and not caplog.records


def test_failures_are_not_retried_after_the_engine_was_stopped() -> None:
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise ValueError("always")

    def end() -> None:
        assert failed.wait(TIMEOUT_S)
        raise SwarmServerOfflineError("stopped")

    executor = PeriodicDrainThreadPoolExecutor(workers=2)
    executor.submit_with_periodic_drain(fail)
    executor.submit_with_periodic_drain(end)
    with pytest.raises(SwarmServerOfflineError):
        executor.shutdown()


def test_a_window_is_over_before_the_next_begins() -> None:
    executor = PeriodicDrainThreadPoolExecutor(workers=2, max_parallel=2, auto_retry=False)
    drained = [executor.submit_with_periodic_drain(int, str(number))[1] for number in range(5)]
    assert drained == [[], [], [0, 1], [], [2, 3]]
    assert executor.shutdown() == [4]


def test_a_window_returns_the_results_of_the_calls_that_succeeded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = PeriodicDrainThreadPoolExecutor(workers=2, auto_retry=False)
    executor.submit_with_periodic_drain(int, "one")
    executor.submit_with_periodic_drain(int, "2")
    assert executor.shutdown() == [2]
    assert "an episode failed" in caplog.text


def test_shutdown_also_waits_for_calls_outside_of_windows() -> None:
    executor = PeriodicDrainThreadPoolExecutor(workers=2, auto_retry=False)
    may_end, ended = threading.Event(), threading.Event()

    def run() -> None:
        may_end.wait(TIMEOUT_S)
        ended.set()

    executor.submit(run)
    threading.Timer(0.05, may_end.set).start()
    executor.shutdown()
    assert ended.is_set()


def test_the_first_call_may_block_until_it_is_done() -> None:
    executor = PeriodicDrainThreadPoolExecutor(workers=2, auto_retry=False, block_first_run=True)
    assert executor.submit(int, "1").done()
    executor.shutdown()
