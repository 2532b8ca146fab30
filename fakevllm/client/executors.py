"""Many episodes at once, in threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fakevllm.client.errors import SwarmServerOfflineError
from fakevllm_adapters.swarm import Task

if TYPE_CHECKING:
    from fakevllm.client.swarm_client import SwarmClient

log = logging.getLogger("fakevllm.client")
P = ParamSpec("P")
R = TypeVar("R")

FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 30.0


def run_episodes_until_all_complete(
    tasks: Sequence[Task],
    func: Callable[[Task], R],
    max_workers: int | None = None,
    auto_retry: bool = True,
) -> list[R]:
    """`func` once for each task, all at once or `max_workers` at a time; the results in the tasks'
    order. With `auto_retry` what fails is run again until it does not."""
    if not tasks:
        return []
    run = Retries().of(func) if auto_retry else func
    pool = DaemonPool(max_workers or len(tasks))
    try:
        futures = [pool.submit(run, task) for task in tasks]
        return [future.result() for future in futures]
    finally:
        pool.shutdown()


class PeriodicDrainThreadPoolExecutor:
    """Episodes in windows: after each `workers` of them all must be over before the next begin, so
    that a window is a batch.

        executor = PeriodicDrainThreadPoolExecutor(workers=8 * 4, max_parallel=16)
        for task in tasks:
            for _ in range(4):
                executor.submit_with_periodic_drain(fn=rollout, task=task)
        executor.shutdown()
    """

    def __init__(
        self,
        workers: int = 100,
        max_parallel: int | None = None,
        auto_retry: bool = True,
        block_first_run: bool = False,
    ) -> None:
        """`workers` is the size of a window, `max_parallel` how many run at once. With
        `block_first_run` the first one runs alone, so that a mistake is seen once and at once."""
        self._window = workers
        self._pool = DaemonPool(max_parallel or workers)
        self._retries = Retries() if auto_retry else None
        self._is_first = block_first_run
        self._open: list[Future[Any]] = []

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        run = fn if self._retries is None else self._retries.of(fn)
        future = self._pool.submit(run, *args, **kwargs)
        if self._is_first:
            self._is_first = False
            future.exception()  # waits
        return future

    def submit_with_periodic_drain(
        self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Future[R], list[Any]]:
        """The future, and the results of the window that was waited for first, if one was."""
        drained = self.drain() if len(self._open) >= self._window else []
        future = self.submit(fn, *args, **kwargs)
        self._open.append(future)
        return future, drained

    def drain(self) -> list[Any]:
        """Waits for all that were submitted in this window; their results, without those that
        failed, which are logged."""
        window, self._open = self._open, []
        results: list[Any] = []
        for future in window:
            error = future.exception()
            if error is None:
                results.append(future.result())
            else:
                log.error("an episode failed", exc_info=error)
        return results

    def shutdown(self, wait: bool = True) -> list[Any]:
        """The last window's results."""
        results = self.drain() if wait else []
        self._pool.shutdown()
        return results


def auto_train_with_dataset(
    dataset: Iterable[Task],
    client: SwarmClient,
    execute_agent: Callable[..., Any],
    local_grpo_n: int = 2,
    remote_batch_size: int = 8,
    max_parallel: int = 64,
) -> None:
    """Each task `local_grpo_n` times through `execute_agent(task, access)`, which returns a
    WorkflowOutput; a batch is waited for before the next begins."""

    def rollout(task: Task) -> None:
        with client.episode(task) as episode:
            client.end_episode(task, episode.uuid, execute_agent(task, episode.access))
            episode.is_ended = True

    executor = PeriodicDrainThreadPoolExecutor(remote_batch_size * local_grpo_n, max_parallel)
    for task in dataset:
        for _ in range(local_grpo_n):
            executor.submit_with_periodic_drain(rollout, task)
    executor.shutdown()


class DaemonPool:
    """Threads that do not keep a script alive: one that is interrupted ends at once, and its
    episodes go to the next client."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()
        self._work.put((future, lambda: fn(*args, **kwargs)))
        if len(self._threads) < self._size:
            thread = threading.Thread(target=self._run, name="episode", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def shutdown(self) -> None:
        """What was submitted is still run, unless its future is cancelled; nobody is waited for."""
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, run = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(run())
            except BaseException as error:  # the future's reader gets it
                future.set_exception(error)


class Retries:
    """Runs a function again until it returns, later and later. Each mistake is shown in full once,
    then in a line: hundreds of threads make the same one. An engine that was stopped ends it."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def of(self, func: Callable[P, R]) -> Callable[P, R]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            pause_s = FIRST_RETRY_S
            while True:
                try:
                    return func(*args, **kwargs)
                except SwarmServerOfflineError:
                    raise
                except Exception as error:
                    self._tell(error, pause_s)
                    self._sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_RETRY_S)

        return run

    def _tell(self, error: Exception, pause_s: float) -> None:
        told = f"{type(error).__name__}: {error}"
        with self._lock:
            is_new = told not in self._seen
            self._seen.add(told)
        log.warning(
            "an episode failed, and is run again in %.1f s: %s",
            pause_s,
            told,
            exc_info=error if is_new else None,
        )
