"""Notice that the hook files on disk differ from the hooks that run.

Hooks are loaded when the hook process starts. A hook file that is changed later has no effect until
the proxy is restarted. Without a message, the user would wait for an effect that does not come.
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
"""Seconds between two checks of the files. A check reads the files, which are small."""


class HookFileWatch:
    """A watch over the hook files of one proxy. `run` checks the files regularly."""

    def __init__(self, path: Path, running_hash: Callable[[], str]) -> None:
        """Watch the files at `path`. `running_hash` returns the content hash of the hooks that
        run."""
        self._path = path.expanduser().resolve()
        self._running_hash = running_hash
        self._logged_for: str | None = None
        """Content hash of the running hooks for which a difference was logged."""

    async def run(self) -> None:
        """Check the files until this task is cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_EVERY_S)

    async def check(self) -> str | None:
        """Compare the files with the hooks that run. Return a message if they differ, else None.

        The first difference from the running hooks is logged, and later ones are not.
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
