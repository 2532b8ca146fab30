"""Wait at the end of a script until all calls that the script has submitted to thread pools have
ended."""

from __future__ import annotations

import concurrent.futures.thread  # registers its exit function, which must run after the one below
import logging
import os
import sys
import threading
import weakref
from typing import Protocol

log = logging.getLogger("fakevllm.sdk")


class WorkingPool(Protocol):
    """A thread pool that must finish its calls before the script ends."""

    @property
    def num_unfinished(self) -> int:
        """Number of calls submitted to this thread pool for which the script must wait."""
        ...

    def wait(self) -> None:
        """Wait until all calls submitted to this thread pool have ended, or until an error has
        stopped the pool."""
        ...

    def cancel(self) -> None:
        """Cancel all calls submitted to this thread pool that have not begun."""
        ...


_pools: weakref.WeakSet[WorkingPool] = weakref.WeakSet()
os.register_at_fork(after_in_child=_pools.clear)  # a forked process has no threads of its parent


def finish_at_exit(pool: WorkingPool) -> None:
    """Make the script wait for the calls of `pool` when it ends. A script that ends with an
    unhandled exception, such as KeyboardInterrupt, does not wait."""
    _pools.add(pool)


def _finish_calls() -> None:
    if getattr(sys, "last_type", None) is not None:  # the type of the unhandled exception
        return
    try:
        # A call may create a further executor.
        while pools := [pool for pool in tuple(_pools) if pool.num_unfinished]:
            log.info(
                "the script waits for %d submitted calls; Ctrl-C cancels them",
                sum(pool.num_unfinished for pool in pools),
            )
            for pool in pools:
                pool.wait()
    except KeyboardInterrupt:
        for pool in tuple(_pools):
            pool.cancel()


# A function that is registered with `atexit` would run after the exit function of
# `concurrent.futures`. From then on, a call could not use the standard library's thread pools, but
# an event loop needs one to look up host names.
assert concurrent.futures.thread
threading._register_atexit(_finish_calls)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
