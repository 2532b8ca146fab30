"""Detect that the hook files on disk differ from the hooks that run. Reload the files if the user
has set `--watch-hooks`.

The proxy reads the files when it starts. A later change of a file has no effect until the hooks are
reloaded. With `--watch-hooks`, this module starts the reload. Without the flag, it logs the command
that reloads the hooks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from fakevllm.errors import HookError
from fakevllm.hooks.file_events import FileEvents
from fakevllm.hooks.loader import content_hash
from fakevllm.hooks.reload_schedule import SETTLE_S, ReloadSchedule

log = logging.getLogger("fakevllm.hooks")

CHECK_EVERY_S = 1.0
"""Seconds between two checks of the files. A check reads all hook files, which is cheap because
they are small. Some changes cause no event, such as a link to another folder."""
_UNREADABLE_CHECKS = 2
"""Number of consecutive checks that must fail to read the files before a warning is logged. A
command such as `git checkout` may delete a file for a moment."""


class HookFileWatch:
    """A watch on the hook files of one proxy. `run` checks regularly whether the files have
    changed."""

    def __init__(
        self,
        path: Path,
        running_hash: Callable[[], str],
        reload: Callable[[], Awaitable[str | None]] | None = None,
    ) -> None:
        """Create the watch for the hook files at `path`. `running_hash` returns the content hash of
        the hooks that run. `reload` is a function that tries to load the files on disk. It returns
        the digest of these files, or None if the same files must be tried again later. If `reload`
        is None, changed files are not reloaded, and the change is only logged."""
        self._path = path.expanduser().absolute()  # a link may get another target
        self._running_hash = running_hash
        self._reload = reload
        self._logged_for: str | None = None
        """Content hash of the running hooks at the time when a difference between files and hooks
        was last logged; None if no difference was logged."""

    async def run(self) -> None:
        """Check regularly whether the hook files have changed, until this task is cancelled."""
        if self._reload is None:
            while True:
                await self.check()
                await asyncio.sleep(CHECK_EVERY_S)
        folder = self._path if self._path.is_dir() else self._path.parent
        events = FileEvents(folder)
        receiving = asyncio.create_task(events.run())
        try:
            await self._reload_changes(events, self._reload)
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def check(self) -> str | None:
        """Compare the hook files with the hooks that run. Return a message if they differ, else
        None.

        If this object was created without `reload`, also log the message. While the same hooks run,
        the message is logged only once, even if the files change further.
        """
        running = self._running_hash()
        message = await asyncio.to_thread(self._difference, running)
        if message is not None and self._logged_for != running and self._reload is None:
            self._logged_for = running
            log.warning("%s", message)
        return message

    async def _reload_changes(
        self, events: FileEvents, reload: Callable[[], Awaitable[str | None]]
    ) -> None:
        schedule = ReloadSchedule()
        num_unreadable = 0
        while True:
            files = await asyncio.to_thread(self._digest)
            num_unreadable = num_unreadable + 1 if files is None else 0
            if num_unreadable == _UNREADABLE_CHECKS:
                log.warning("%s", self._message(files))
            if schedule.is_due(files, self._running_hash(), time.monotonic()):
                try:
                    schedule.tried(await reload())
                except Exception:  # isolates: a later change must be tried all the same
                    log.exception("the hooks could not be reloaded")
            await events.wait(SETTLE_S if schedule.is_settling else CHECK_EVERY_S)

    def _digest(self) -> str | None:
        try:
            return content_hash(self._path)
        except (HookError, OSError):
            return None

    def _difference(self, running: str) -> str | None:
        files = self._digest()
        return None if files == running else self._message(files)

    def _message(self, files: str | None) -> str:
        changed = "changed on disk" if files is not None else "on disk cannot be read"
        advice = "run `fakevllm hooks reload` to use the files on disk"
        if files is None:
            advice = "put the files back before the next restart"
        elif self._reload is not None:
            advice = "the log says why, if the files on disk were refused"
        return (
            f"The hook files {changed} ({self._path}). The proxy still runs the hooks that it "
            f"loaded before: {advice}."
        )
