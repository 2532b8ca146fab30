"""Executors with a limit on the submitted calls or groups. When the limit is reached, a new
submission blocks until a call or a group has ended.

A script can therefore submit an endless stream of tasks, and no queue grows without limit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, ParamSpec, TypeVar

from fakevllm.sdk.episode_executors import FINAL_ERRORS, DaemonThreadPool, Retrier
from fakevllm.sdk.exit_wait import finish_at_exit

log = logging.getLogger("fakevllm.sdk")
P = ParamSpec("P")
R = TypeVar("R")


class BoundedThreadPoolExecutor:
    """A thread pool whose queue is bounded: `submit` blocks while the queue is full.

    If a call fails because the engine is stopped or the client is closed, no further call begins.
    `submit` then raises this error.
    """

    def __init__(self, max_workers: int, max_queue_size: int = 100) -> None:
        """Create the executor. At most `max_workers` calls run at once, and at most
        `max_queue_size` further calls wait in the queue."""
        self._pool = DaemonThreadPool(max_workers, final_errors=FINAL_ERRORS)
        finish_at_exit(self._pool)
        self._slots = _Slots(max_workers + max_queue_size, lambda: self._pool.has_ended)
        self._unfinished: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue a call, and return its future. While the queue is full, wait for a free place."""
        self._slots.acquire()
        try:
            future = self._pool.submit(fn, *args, **kwargs)
        except BaseException:
            self._slots.release()
            raise
        self._unfinished.add(future)
        future.add_done_callback(self._on_done)
        return future

    def shutdown(self, wait: bool = True) -> None:
        """Let the threads end after all submitted calls have run. If `wait` is True, return only
        when all calls have ended. If `wait` is False, return at once."""
        try:
            while wait and self._unfinished:  # a call may have submitted another one
                wait_for(tuple(self._unfinished))
        except KeyboardInterrupt:
            self._pool.cancel()
            raise
        finally:
            self._pool.shutdown()

    def _on_done(self, future: Future[Any]) -> None:
        self._unfinished.discard(future)
        self._slots.release()


class TaskCountLimitedThreadPoolExecutor:
    """An executor that runs groups (the episodes of one task each).

    At most `max_parallel_groups` groups run at a time. A group ends when all its calls have ended.
    When a weight sync (a training step) begins, groups that were submitted earlier no longer count
    towards the limit. Therefore slow episodes do not delay the next batch.

        executor = TaskCountLimitedThreadPoolExecutor(max_parallel_groups=8, max_workers=64)
        client.add_entering_weight_sync_callback(executor.on_entering_weight_sync)
        for task in tasks:
            arguments = [{"task": task} for _ in range(num_repeat)]
            executor.submit_group(task_id=task.task_id, fn=rollout, args_list=arguments)
        executor.shutdown()

    When the engine is stopped or the client is closed, no further episode begins. The next call of
    any method of the executor then raises the error (SwarmServerOfflineError or ClientClosed).
    """

    def __init__(
        self,
        max_parallel_groups: int,
        max_workers: int,
        auto_retry: bool = True,
        block_first_run: bool = False,
    ) -> None:
        """Create the executor. `max_parallel_groups` is the maximum number of groups (the episodes
        of one task each) that run at once. `max_workers` is the maximum number of episodes that run
        at once. With `auto_retry`, a failed call is retried until it succeeds. With
        `block_first_run`, the first episode runs alone. A mistake in the script then causes one
        error instead of many."""
        self._pool = DaemonThreadPool(max_workers, final_errors=FINAL_ERRORS)
        finish_at_exit(self._pool)
        self._retrier = Retrier()
        self._auto_retry = auto_retry
        self._blocks_next_run = block_first_run
        self._slots = _Slots(max_parallel_groups, lambda: self._pool.has_ended)
        self._counted: set[_Group] = set()
        """Groups that count towards `max_parallel_groups`."""
        self._unfinished: set[Future[Any]] = set()
        self._lock = threading.Lock()

    def submit_group(
        self, task_id: str, fn: Callable[..., R], args_list: Iterable[Mapping[str, Any]]
    ) -> list[Future[R]]:
        """Submit one call of `fn` for each element of `args_list`, and return the futures. Each
        element is a dict with the keyword arguments of its call. If `max_parallel_groups` groups
        are running already, first wait until a group ends.

        `task_id` names the group in log lines about calls that failed.
        """
        calls = list(args_list)
        if not calls:
            return []
        try:
            self._slots.acquire()
        except KeyboardInterrupt:
            self._stop()
            raise
        group = _Group(task_id, len(calls))
        with self._lock:
            self._counted.add(group)
        run = self._retrier.wrap(fn) if self._auto_retry else fn
        return [self._submit(group, run, arguments) for arguments in calls]

    def on_entering_weight_sync(self) -> None:
        """Exclude all groups that were submitted earlier from the limit `max_parallel_groups`. The
        calls of these groups continue."""
        with self._lock:
            groups = tuple(self._counted)
        for group in groups:
            self._stop_counting(group)

    def shutdown(self, wait: bool = True) -> None:
        """Let the threads end after all submitted calls have run. If `wait` is True, return only
        when all calls have ended. If `wait` is False, return at once. If an error (such as a
        stopped engine) has ended the executor, raise this error."""
        try:
            while wait and self._unfinished:
                wait_for(tuple(self._unfinished))
            self._pool.check()
        except KeyboardInterrupt:
            self._stop()
            raise
        finally:
            self._pool.shutdown()

    def _submit(
        self, group: _Group, run: Callable[..., R], arguments: Mapping[str, Any]
    ) -> Future[R]:
        try:
            future = self._pool.submit(run, **arguments)
        except BaseException:
            self._stop_counting(group)
            raise
        self._unfinished.add(future)
        future.add_done_callback(lambda done: self._on_done(group, done))
        if self._blocks_next_run:
            self._blocks_next_run = False
            wait_for([future])
        return future

    def _on_done(self, group: _Group, future: Future[Any]) -> None:
        self._unfinished.discard(future)
        if self._pool.has_ended:
            self._retrier.stop()
        elif not future.cancelled() and (error := future.exception()) is not None:
            log.error("an episode of task %s failed", group.task_id, exc_info=error)
        with self._lock:
            group.num_unfinished -= 1
        if group.num_unfinished == 0 or self._pool.has_ended:
            self._stop_counting(group)

    def _stop_counting(self, group: _Group) -> None:
        with self._lock:
            is_counted = group in self._counted
            self._counted.discard(group)
        if is_counted:
            self._slots.release()

    def _stop(self) -> None:
        self._retrier.stop()
        self._pool.cancel()


class _Group:
    """The submitted calls of one task, which run as one group."""

    def __init__(self, task_id: str, num_calls: int) -> None:
        self.task_id = task_id
        self.num_unfinished = num_calls


class _Slots:
    """A fixed number of slots. A thread that asks for a slot while none is free waits. The wait
    ends when a slot is released, or when the thread pool has ended."""

    def __init__(self, num_slots: int, has_ended: Callable[[], bool]) -> None:
        if num_slots < 1:
            raise ValueError(f"an executor needs at least one slot, got {num_slots}")
        self._num_free = num_slots
        self._has_ended = has_ended
        self._changed = threading.Condition()

    def acquire(self) -> None:
        """Take a slot. If no slot is free, wait until a slot is released or the thread pool has
        ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_free > 0 or self._has_ended())
            self._num_free -= 1

    def release(self) -> None:
        with self._changed:
            self._num_free += 1
            self._changed.notify()
