"""Watch a folder of hook files for file system events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from watchfiles import Change, awatch  # pyright: ignore[reportUnknownVariableType]

log = logging.getLogger("fakevllm.hooks")
logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it logs each event

RETRY_S = 10.0
"""Seconds after a failed attempt to watch a folder until the next attempt."""
_DEBOUNCE_MS = 100
"""Events that occur within this number of milliseconds are combined into one event."""


class FileEvents:
    """The file system events of one folder. `run` receives the events, and `wait` waits for the
    next event."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Receive the events for which `wait` waits, until this task is cancelled."""
        is_logged = False
        while True:
            try:
                events = awatch(
                    self._folder,
                    watch_filter=_is_python_file,
                    debounce=_DEBOUNCE_MS,
                    recursive=False,
                )
                async for _ in events:
                    self._changed.set()
            except Exception as error:  # isolates: the files are also read at regular intervals
                if not is_logged:
                    log.warning("%s cannot be watched for changes (%s)", self._folder, error)
                is_logged = True
            await asyncio.sleep(RETRY_S)

    async def wait(self, timeout_s: float) -> None:
        """Wait until a Python file in the folder has changed since the previous call, or until the
        timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()


def _is_python_file(_: Change, path: str) -> bool:
    return path.endswith(".py")
