"""Detect that the hook files on disk differ from the hooks that the hook process has loaded.

The hook process loads the files when it starts. A later change of a file has no effect until this
process is started again, usually by a restart of the proxy. This module therefore warns a user who
has changed a file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from fakevllm.errors import HookError
from fakevllm.hooks.loader import content_hash

log = logging.getLogger("fakevllm.hooks")

CHECK_EVERY_S = 2.0
"""Seconds between two checks of the files. A check reads all hook files, which is cheap because
they are small."""


class HookFileWatch:
    """Watches the hook files of one proxy for changes. `run` checks the files regularly."""

    def __init__(self, path: Path, running_hash: Callable[[], str]) -> None:
        """Create the watch for the hook files at `path`. `running_hash` returns the content hash of
        the hooks that the hook process has loaded."""
        self._path = path.expanduser().resolve()
        self._running_hash = running_hash
        self._logged_for: str | None = None
        """Content hash of the loaded hooks at the time when a difference between files and hooks
        was last logged; None if no difference was logged."""

    async def run(self) -> None:
        """Check the files until this task is cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_EVERY_S)

    async def check(self) -> str | None:
        """Compare the hook files with the hooks that the hook process has loaded. If the files
        differ from the loaded hooks, return a message, else None.

        The message is logged only when the first difference is found. Further changes of the files
        are not logged until the hook process has loaded other hooks.
        """
        running = self._running_hash()
        message = await asyncio.to_thread(self._difference, running)
        if message is not None and self._logged_for != running:
            self._logged_for = running
            log.warning("%s", message)
        return message

    def _difference(self, running: str) -> str | None:
        try:
            if content_hash(self._path) == running:
                return None
            problem = "The hook files changed on disk"
        except (HookError, OSError):
            problem = "The hook files on disk cannot be read"
        return (
            f"{problem} ({self._path}). The proxy still runs the hooks that it loaded before: "
            "restart `fakevllm serve` to use the files on disk."
        )
