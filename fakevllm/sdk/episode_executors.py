"""Run many episodes at once in threads, and retry episodes that fail."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future
from concurrent.futures import wait as wait_for
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fakevllm.sdk.exit_wait import finish_at_exit
from fakevllm.sdk.types import ClientClosed, SwarmServerOfflineError
from fakevllm_adapters.protocol.swarm import Task
from fakevllm_runtime.log_throttle import LogThrottle

if TYPE_CHECKING:
    from fakevllm.sdk.client import SwarmClient


log = logging.getLogger("fakevllm.sdk")
P = ParamSpec("P")
R = TypeVar("R")

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 30.0
LOG_INTERVAL_S = 5.0
"""Seconds between log lines about the same error."""
FINAL_ERRORS = (SwarmServerOfflineError, ClientClosed)
"""Errors that end an executor, because every further episode would fail as well."""


def run_episodes_until_all_complete(
    tasks: Sequence[Task],
    func: Callable[[Task], R],
    max_workers: int | None = None,
    auto_retry: bool = True,
) -> list[R]:
    """Call `func` once for each task, and return the results in the order of the tasks.

    If `max_workers` is set, at most `max_workers` tasks run at a time. Otherwise all tasks run at
    once. With `auto_retry`, a failed call of `func` is retried until it succeeds. Without
    `auto_retry`, the first error is raised and no further task begins.
    """
    if not tasks:
        return []
    retrier = Retrier()
    run = retrier.wrap(func) if auto_retry else func
    pool = DaemonThreadPool(max_workers or len(tasks), final_errors=(BaseException,))
    try:
        futures = [pool.submit(run, task) for task in tasks]
        wait_for(futures, return_when=FIRST_EXCEPTION)
        pool.check()
        return [future.result() for future in futures]
    finally:
        retrier.stop()
        pool.cancel()
        pool.shutdown()


class PeriodicDrainThreadPoolExecutor:
    """An executor that runs episodes in windows (batches) of `workers` episodes. A window begins
    when all episodes of the previous window have ended.

        executor = PeriodicDrainThreadPoolExecutor(workers=8 * 4, max_parallel=16)
        for task in tasks:
            for _ in range(4):
                executor.submit_with_periodic_drain(fn=rollout, task=task)
        executor.shutdown()

    When the engine is stopped or the client is closed, no further episode begins. The next call of
    any method of the executor then raises the error (SwarmServerOfflineError or ClientClosed).

    A script that ends without `shutdown()` waits for the submitted episodes. It does not wait if an
    unhandled exception, such as KeyboardInterrupt, ends the script.
    """

    def __init__(
        self,
        workers: int = 100,
        max_parallel: int | None = None,
        auto_retry: bool = True,
        block_first_run: bool = False,
    ) -> None:
        """Create the executor. `workers` is the number of episodes in a window (a batch).
        `max_parallel` is the maximum number of episodes that run at once. With `auto_retry`, a
        failed call is retried until it succeeds. With `block_first_run`, the first episode runs
        alone. A mistake in the script then causes one error instead of many."""
        self._window_size = workers
        self._pool = DaemonThreadPool(max_parallel or workers, final_errors=FINAL_ERRORS)
        finish_at_exit(self._pool)
        self._retrier = Retrier()
        self._auto_retry = auto_retry
        self._blocks_next_run = block_first_run
        self._window: list[Future[Any]] = []
        """Futures of the current window."""
        self._unfinished: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        run = self._retrier.wrap(fn) if self._auto_retry else fn
        future = self._pool.submit(run, *args, **kwargs)
        self._unfinished.add(future)
        future.add_done_callback(self._on_done)
        if self._blocks_next_run:
            self._blocks_next_run = False
            future.exception()  # waits until it is done
        return future

    def submit_with_periodic_drain(
        self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Future[R], list[Any]]:
        """Submit a call of `fn`. If the current window (batch of calls) is full, first wait until
        all calls of the window have ended.

        Return a pair: the future of the submitted call, and the results of the full window. The
        results are [] if the window was not full.
        """
        drained = self.drain() if len(self._window) >= self._window_size else []
        future = self.submit(fn, *args, **kwargs)
        self._window.append(future)
        return future, drained

    def drain(self) -> list[Any]:
        """Wait until all calls of the current window (batch of calls) have ended. Return the
        results of the calls that succeeded.

        Errors of the other calls are logged. If an error such as a stopped engine has ended the
        executor, that error is raised.
        """
        window, self._window = self._window, []
        self._wait_for(window)
        results: list[Any] = []
        for future in window:
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                results.append(future.result())
            elif not isinstance(error, FINAL_ERRORS):
                log.error("an episode failed", exc_info=error)
        self._pool.check()
        return results

    def shutdown(self, wait: bool = True) -> list[Any]:
        """Wait until all submitted calls have ended, and return the results of the last window
        (batch of calls). With `wait=False`, do not wait, and return []."""
        try:
            while wait and self._unfinished:  # a call may have submitted another one
                self._wait_for(tuple(self._unfinished))
            return self.drain() if wait else []
        finally:
            self._pool.shutdown()

    def _on_done(self, future: Future[Any]) -> None:
        self._unfinished.discard(future)
        if self._pool.has_ended:
            self._retrier.stop()

    def _wait_for(self, futures: Collection[Future[Any]]) -> None:
        try:
            wait_for(futures)
        except KeyboardInterrupt:
            self._retrier.stop()
            self._pool.cancel()
            raise


def auto_train_with_dataset(
    dataset: Iterable[Task],
    client: SwarmClient,
    execute_agent: Callable[..., Any],
    local_grpo_n: int = 2,
    remote_batch_size: int = 8,
    max_parallel: int = 64,
) -> None:
    """Run `local_grpo_n` episodes for each task. Each episode calls `execute_agent(task, access)`,
    where `access` has the base URL and the API key of the episode. `execute_agent` returns a
    WorkflowOutput.

    The episodes run in batches of `remote_batch_size` tasks. A batch begins when all episodes of
    the previous batch have ended. Raises SwarmServerOfflineError if the engine is stopped while the
    episodes run.
    """

    def rollout(task: Task) -> None:
        with client.episode(task) as episode:
            episode.end_with(execute_agent(task, episode.access))

    executor = PeriodicDrainThreadPoolExecutor(remote_batch_size * local_grpo_n, max_parallel)
    for task in dataset:
        for _ in range(local_grpo_n):
            executor.submit_with_periodic_drain(rollout, task)
    executor.shutdown()


class DaemonThreadPool:
    """A thread pool whose threads are daemon threads. Python does not wait for daemon threads at
    the end of a script, so an interrupted script ends at once.

    If a script that ends normally must wait for its calls, pass the pool to `finish_at_exit`.
    """

    def __init__(self, size: int, final_errors: tuple[type[BaseException], ...] = ()) -> None:
        """Create a pool of at most `size` threads. The pool ends if a call raises an error of a
        type in `final_errors`. Then no further call begins, and the futures of waiting calls are
        cancelled."""
        self._size = size
        self._final_errors = final_errors
        self._error: BaseException | None = None
        """The error that ended the pool."""
        self._num_unfinished = 0
        self._changed = threading.Condition()
        """Condition that is notified when a call ends and when the pool ends."""
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue a call and return its future. If an error has ended the pool, raise this error."""
        self.check()
        future: Future[R] = Future()
        with self._changed:
            self._num_unfinished += 1
        self._work.put((future, lambda: fn(*args, **kwargs)))
        if len(self._threads) < self._size:
            thread = threading.Thread(target=self._run, name="episode", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    @property
    def has_ended(self) -> bool:
        return self._error is not None

    @property
    def num_unfinished(self) -> int:
        """Number of submitted calls that have not ended. The number is 0 if an error has ended the
        pool."""
        return 0 if self.has_ended else self._num_unfinished

    def wait(self) -> None:
        """Return when all calls that were submitted to the pool have ended, or when an error has
        ended the pool."""
        with self._changed:
            self._changed.wait_for(lambda: not self.num_unfinished)

    def check(self) -> None:
        """Raise the error that has ended this thread pool. If no error has ended it, do nothing."""
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Cancel all calls of this thread pool that have not begun, and accept no further calls."""
        with self._changed:
            self._error = self._error or CancelledError()
            self._changed.notify_all()

    def shutdown(self) -> None:
        """Let the threads end after all submitted calls have run. This method does not wait for the
        threads."""
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._run_call(*work)
            del work  # a waiting thread must not keep the arguments and the result alive
            with self._changed:
                self._num_unfinished -= 1
                self._changed.notify_all()

    def _run_call(self, future: Future[Any], run: Callable[[], Any]) -> None:
        if self.has_ended:
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(run())
        except BaseException as error:  # passed to the future's reader
            if isinstance(error, self._final_errors):
                self._error = self._error or error
            future.set_exception(error)


class Retrier:
    """A wrapper that retries a function with exponential backoff until the function succeeds.

    Log lines are rate-limited, because hundreds of threads may fail with the same error. The first
    failure of a kind is logged with its traceback. After that, at most one line per LOG_INTERVAL_S
    seconds is logged for this kind, with the number of further failures. Errors of a type in
    `final_errors`, such as a stopped engine, are raised at once.
    """

    def __init__(
        self,
        sleep: Callable[[float], None] = time.sleep,
        final_errors: tuple[type[Exception], ...] = FINAL_ERRORS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sleep = sleep
        self._final_errors = final_errors
        self._clock = clock
        self._throttle = LogThrottle(LOG_INTERVAL_S)
        self._is_stopped = False

    def stop(self) -> None:
        """Stop retrying. A function that fails from now on raises its error, and no line is
        logged."""
        self._is_stopped = True

    def wrap(self, func: Callable[P, R]) -> Callable[P, R]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            pause_s = FIRST_RETRY_S
            while True:
                try:
                    return func(*args, **kwargs)
                except self._final_errors:
                    raise
                except Exception as error:
                    if not self._is_stopped:
                        self._log_failure(error, pause_s)
                        self._sleep(pause_s)
                    if self._is_stopped:  # perhaps during the pause
                        raise
                    pause_s = min(2 * pause_s, MAX_RETRY_S)

        return run

    def _log_failure(self, error: Exception, pause_s: float) -> None:
        due = self._throttle.due(_kind_of(error), self._clock())
        if due is None:
            return
        num_others = due.num_suppressed
        log.warning(
            "an episode failed and is retried in %.1f s%s: %s: %s",
            pause_s,
            f" ({num_others} more failed in the same place)" if num_others else "",
            type(error).__name__,
            error,
            exc_info=error if due.is_first and not _is_lost_connection(error) else None,
        )


def _kind_of(error: Exception) -> Hashable:
    """Return a key for the kind of an error. Two errors have the same key if they have the same
    type and were raised at the same lines of code.

    The message is not part of the key, because it may contain ids and texts that differ between
    episodes.
    """
    lines = traceback.walk_tb(error.__traceback__)
    return type(error), frozenset((frame.f_code.co_filename, line) for frame, line in lines)


def _is_lost_connection(error: BaseException | None) -> bool:
    """Return True if the error, or an error that caused it, is a lost connection.

    The traceback of such an error is not logged, because it contains only code of libraries.
    """
    while error is not None:
        if isinstance(error, ConnectionError):
            return True
        error = error.__cause__ or error.__context__
    return False
