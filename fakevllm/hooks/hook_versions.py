"""The running versions of the user's hooks. New groups (requests with their answers) use the newest
version. A group that began under an older version keeps this version, so that no group is scored by
two versions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Generator

from fakevllm.hooks.hook_process import EXIT_TIMEOUT_S, HookInfo
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.version_leases import Use, VersionLeases
from fakevllm.runtime.task_set import TaskSet

log = logging.getLogger("fakevllm.hooks")

MAX_OPEN = 4
"""Maximum number of versions whose processes run at a time, including the newest. Each version
needs the memory of a process."""


class HookVersions:
    """The hook processes of a proxy, one for each version of the hooks that is in use. A process is
    closed when its version is no longer used."""

    def __init__(self, worker: HookWorker, now: float | None = None) -> None:
        """Create the object. `worker` is the hook process of the first version. This process must
        have started already. `now` is the Unix time."""
        self._leases = VersionLeases()
        self._workers = {self._leases.current: worker}
        self._closing = TaskSet(log, "an old hook process could not be closed")
        self._is_closed = False
        self.since = time.time() if now is None else now
        """Unix time at which the newest version took over."""

    @property
    def current(self) -> HookWorker:
        """The process that runs the newest version of the user's hooks."""
        return self._workers[self._leases.current]

    @property
    def info(self) -> HookInfo:
        """The description of the newest version of the user's hooks, from its hook process."""
        return self.current.info

    @property
    def num_open(self) -> int:
        """Number of versions of the hooks whose processes run, including the newest version."""
        return self._leases.num_open

    def of_group(self, group_id: str | None) -> HookWorker:
        """Return the hook process that a group (a request with its answers) uses. If the group uses
        no process, return the process of the newest version."""
        return self._workers[self._leases.version_of(group_id)]

    def begin(self, group_id: str, use: Use) -> HookWorker:
        """Return the hook process for a group, and record that the group uses this process. The
        process stays open at least until `end` is called with the same arguments."""
        return self._workers[self._leases.begin(group_id, use)]

    def end(self, group_id: str, use: Use) -> None:
        """Record that a group no longer uses its hook process for `use`, the purpose that was
        passed to `begin`. Close the processes of old versions that no group uses any more."""
        self._close(self._leases.end(group_id, use))

    @contextlib.contextmanager
    def using(self, group_id: str, use: Use) -> Generator[HookWorker]:
        """Yield the process that runs a group's hooks, and keep it open until the `with` block
        ends."""
        try:
            yield self.begin(group_id, use)
        finally:
            self.end(group_id, use)

    def take_over(self, worker: HookWorker, now: float) -> None:
        """Use `worker`, a hook process that has started, for all new groups. This object then owns
        the process, and will close it. `now` is the Unix time in seconds."""
        assert not self._is_closed, "the reloader is closed before the versions"
        ended = self._leases.switch()
        self._workers[self._leases.current] = worker
        self.since = now
        self._close(ended)

    async def close(self) -> None:
        """End all hook processes (the processes that run the user's hooks)."""
        self._is_closed = True
        closing = (worker.close() for worker in self._workers.values())
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(error, Exception):  # isolates: the other processes must end, too
                log.error("a hook process could not be closed (%s)", error)
        await self._closing.close(2 * EXIT_TIMEOUT_S)

    def _close(self, versions: list[int]) -> None:
        for version in versions:
            self._closing.start(self._workers.pop(version).close())
