"""Many episodes at once, in threads."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future
from concurrent.futures import wait as wait_for
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fakevllm.runtime.log_throttle import LogThrottle
from fakevllm.sdk.episode import Episode
from fakevllm.sdk.http_driver import bare_url
from fakevllm.sdk.types import ClientClosed, SwarmError, SwarmServerOfflineError
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import Task, WorkflowOutput

if TYPE_CHECKING:
    from fakevllm.sdk.client import SwarmClient


log = logging.getLogger("fakevllm.sdk")
P = ParamSpec("P")
R = TypeVar("R")

FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 30.0
TELL_EVERY_S = 5.0
"""Between lines about the same mistake."""
ENDS = (SwarmServerOfflineError, ClientClosed)
"""After these no further episode would come to anything else."""


def run_episodes_until_all_complete(
    tasks: Sequence[Task],
    func: Callable[[Task], R],
    max_workers: int | None = None,
    auto_retry: bool = True,
) -> list[R]:
    """`func` once for each task, all at once or `max_workers` at a time; the results in the tasks'
    order. With `auto_retry` what fails is run again until it does not; what fails without ends it
    all: nothing further begins, and it is raised."""
    if not tasks:
        return []
    retries = Retries()
    run = retries.of(func) if auto_retry else func
    pool = DaemonPool(max_workers or len(tasks), ends=(BaseException,))
    try:
        futures = [pool.submit(run, task) for task in tasks]
        wait_for(futures, return_when=FIRST_EXCEPTION)
        pool.check()
        return [future.result() for future in futures]
    finally:
        retries.end()
        pool.cancel()
        pool.shutdown()


class PeriodicDrainThreadPoolExecutor:
    """Episodes in windows: after each `workers` of them all must be over before the next begin, so
    that a window is a batch.

        executor = PeriodicDrainThreadPoolExecutor(workers=8 * 4, max_parallel=16)
        for task in tasks:
            for _ in range(4):
                executor.submit_with_periodic_drain(fn=rollout, task=task)
        executor.shutdown()

    Where the engine was stopped, or the client closed, nothing further begins, and whatever is
    called next raises that.
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
        self._pool = DaemonPool(max_parallel or workers, ends=ENDS)
        self._retries = Retries()
        self._auto_retry = auto_retry
        self._is_first = block_first_run
        self._open: list[Future[Any]] = []
        """Of this window."""
        self._unfinished: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        run = self._retries.of(fn) if self._auto_retry else fn
        future = self._pool.submit(run, *args, **kwargs)
        self._unfinished.add(future)
        future.add_done_callback(self._is_done)
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
        self._wait_for(window)
        results: list[Any] = []
        for future in window:
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                results.append(future.result())
            elif not isinstance(error, ENDS):
                log.error("an episode failed", exc_info=error)
        self._pool.check()
        return results

    def shutdown(self, wait: bool = True) -> list[Any]:
        """The last window's results, once all that was submitted is over."""
        try:
            while wait and self._unfinished:  # one may have submitted another
                self._wait_for(tuple(self._unfinished))
            return self.drain() if wait else []
        finally:
            self._pool.shutdown()

    def _is_done(self, future: Future[Any]) -> None:
        self._unfinished.discard(future)
        if self._pool.is_over:
            self._retries.end()

    def _wait_for(self, futures: Collection[Future[Any]]) -> None:
        try:
            wait_for(futures)
        except KeyboardInterrupt:
            self._retries.end()
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
    """Each task `local_grpo_n` times through `execute_agent(task, access)`, which returns a
    WorkflowOutput; a batch is waited for before the next begins. Raises SwarmServerOfflineError
    where the engine is stopped meanwhile."""

    def rollout(task: Task) -> None:
        with client.episode(task) as episode:
            episode.end_with(execute_agent(task, episode.access))

    executor = PeriodicDrainThreadPoolExecutor(remote_batch_size * local_grpo_n, max_parallel)
    for task in dataset:
        for _ in range(local_grpo_n):
            executor.submit_with_periodic_drain(rollout, task)
    executor.shutdown()


class DaemonPool:
    """Threads that do not keep a script alive: one that is interrupted ends at once, and its
    episodes go to the next client."""

    def __init__(self, size: int, ends: tuple[type[BaseException], ...] = ()) -> None:
        """Behind an error of `ends` nothing further begins: the futures of what waits are
        cancelled."""
        self._size = size
        self._ends = ends
        self._ended: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Raises as `check`."""
        self.check()
        future: Future[R] = Future()
        self._work.put((future, lambda: fn(*args, **kwargs)))
        if len(self._threads) < self._size:
            thread = threading.Thread(target=self._run, name="episode", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    @property
    def is_over(self) -> bool:
        return self._ended is not None

    def check(self) -> None:
        """Raises what ended it, where anything did."""
        if self._ended is not None:
            raise self._ended

    def cancel(self) -> None:
        """What has not begun never does."""
        self._ended = self._ended or CancelledError()

    def shutdown(self) -> None:
        """What was submitted is still run, unless its future is cancelled; nobody is waited for."""
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, run = work
            if self.is_over:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(run())
            except BaseException as error:  # the future's reader gets it
                if isinstance(error, self._ends):
                    self._ended = self._ended or error
                future.set_exception(error)


class Retries:
    """Runs a function again until it returns, later and later. Hundreds of threads make the same
    mistake: it is shown in full once, then now and again in a line with their number. `ends` are
    not run again, such as an engine that was stopped."""

    def __init__(
        self,
        sleep: Callable[[float], None] = time.sleep,
        ends: tuple[type[Exception], ...] = ENDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sleep = sleep
        self._ends = ends
        self._clock = clock
        self._throttle = LogThrottle(TELL_EVERY_S)
        self._is_over = False

    def end(self) -> None:
        """Nobody waits any more: what fails from now on is neither told nor run again."""
        self._is_over = True

    def of(self, func: Callable[P, R]) -> Callable[P, R]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            pause_s = FIRST_RETRY_S
            while True:
                try:
                    return func(*args, **kwargs)
                except self._ends:
                    raise
                except Exception as error:
                    if not self._is_over:
                        self._tell(error, pause_s)
                        self._sleep(pause_s)
                    if self._is_over:  # perhaps since
                        raise
                    pause_s = min(2 * pause_s, LONGEST_RETRY_S)

        return run

    def _tell(self, error: Exception, pause_s: float) -> None:
        due = self._throttle.due(_kind_of(error), self._clock())
        if due is None:
            return
        others = due.num_suppressed
        log.warning(
            "an episode failed, and is run again in %.1f s%s: %s: %s",
            pause_s,
            f", as {others} others that failed alike" if others else "",
            type(error).__name__,
            error,
            exc_info=error if due.is_first and not _is_lost_connection(error) else None,
        )


def _kind_of(error: Exception) -> Hashable:
    """Its type and the lines it came through. Its words differ from episode to episode: they hold
    ids, and what the model said."""
    lines = traceback.walk_tb(error.__traceback__)
    return type(error), frozenset((frame.f_code.co_filename, line) for frame, line in lines)


def _is_lost_connection(error: BaseException | None) -> bool:
    """Of which a traceback through three libraries tells nothing more."""
    while error is not None:
        if isinstance(error, ConnectionError):
            return True
        error = error.__cause__ or error.__context__
    return False


# Several servers at once: one agent, several models that learn.


def start_engines(
    clients: Sequence[tuple[SwarmClient, TrainJob]], force_restart: bool = False
) -> None:
    """Each server's engine with its job, side by side, for large models take minutes. Raises
    SwarmError with what each one that failed said."""

    def start(one: tuple[SwarmClient, TrainJob]) -> str | None:
        client, job = one
        try:
            client.auto_sync_train_config_and_start_engine(job, force_restart)
        except SwarmError as error:
            return f"{bare_url(client.server_url)}: {error}"
        return None

    pool = DaemonPool(len(clients))
    told = [one.result() for one in [pool.submit(start, client) for client in clients]]
    pool.shutdown()
    failures = [one for one in told if one is not None]
    if failures:
        raise SwarmError("; ".join(failures))


@contextlib.contextmanager
def episodes_together(
    clients: Sequence[SwarmClient], task: Task, discard_episode_timeout: float = 240.0
) -> Generator[list[Episode]]:
    """An episode of each server for one run of an agent; all of them end, or all are aborted.

    `end` keeps the outcome; the servers are told when the block is left, after each has said that
    its claim still stands. All are aborted where the block raises, where one has no outcome, or
    where one claim is gone (EpisodeLost). A server that loses its claim in the instant between
    being asked and being told is the one case in which the others have ended.
    """
    outputs: dict[str, WorkflowOutput] = {}
    with contextlib.ExitStack() as held:
        episodes = [_begin(held, one, task, discard_episode_timeout, outputs) for one in clients]
        yield episodes
        if len(outputs) < len(episodes):
            return
        for client, episode in zip(clients, episodes, strict=True):
            client.renew_episode(episode.uuid)
        for client, episode in zip(clients, episodes, strict=True):
            client.end_episode(task, episode.uuid, outputs.pop(episode.uuid))


def _begin(
    held: contextlib.ExitStack,
    client: SwarmClient,
    task: Task,
    idle_limit_s: float,
    outputs: dict[str, WorkflowOutput],
) -> Episode:
    """Aborted at the end, unless it has ended by then, which an abort does not change."""
    uuid, access = client.open_claims.begin(lambda: client.begin_episode(idle_limit_s))
    held.callback(client.open_claims.let_go, uuid)
    held.callback(client.abort_episode, uuid)

    def keep(output: WorkflowOutput) -> None:
        outputs[uuid] = output

    return Episode(task, access, keep)
