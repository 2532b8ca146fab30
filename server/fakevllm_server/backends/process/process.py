"""A process of the server's: started, watched, stopped, its end told.

It is in its own session, so Ctrl-C reaches only the server, which stops it, and all it started
itself can be ended with it. It holds the read end of a pipe as standard input and leaves when that
closes, so a killed server leaves no engine behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from fakevllm_server.types.backend import BackendError, BackendRefused

BOOT_TIMEOUT_S = 600.0
"""Loading a large model from a slow disk."""
STOP_GRACE_S = 10.0
REFUSED_EXIT_CODE = 2
"""An engine's word for: the user must mend something."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""By SIGKILL, or a shell's word for it."""
LOOK_EVERY_S = 0.05
TAIL_BYTES = 4096


class ChildProcess:
    """At most one process at a time, under one name and log file."""

    def __init__(self, name: str, log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Raises BackendRefused where there is no such program."""
        await self.close()
        with self.log_file.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=env,
                )
            except OSError as error:
                raise BackendRefused(
                    f"{self.name} cannot be started: {command[0]}: {error.strerror}"
                ) from None

    async def until(
        self, ready: Callable[[], Awaitable[bool]], timeout_s: float | None = None
    ) -> None:
        """Until `ready`. Raises BackendError, or BackendRefused, where the process ends first or
        the time is over."""
        assert self._process is not None, "start first"
        limit_s = BOOT_TIMEOUT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not await ready():
            if self._process.returncode is not None:
                refused = self._process.returncode == REFUSED_EXIT_CODE
                raise (BackendRefused if refused else BackendError)(await self.lost())
            if time.monotonic() > deadline:
                raise BackendError(f"{self.name} was not ready after {limit_s:.0f} s")
            await asyncio.sleep(LOOK_EVERY_S)

    async def lost(self) -> str:
        """Returns when the process has ended, with what is known of why."""
        assert self._process is not None, "start first"
        code = await self._process.wait()
        told = f"{self.name} exited with code {code}"
        if code in KILLED:
            told += " (killed: out of memory?)"
        if code == REFUSED_EXIT_CODE:
            return f"{told}: {_last_line(self.log_file)}"
        # This reaches apps, and a log's end may be a traceback.
        return f"{told}; see {self.log_file.name}"

    async def close(self, grace_s: float = STOP_GRACE_S) -> None:
        """Asks it to end, then ends it, with whatever it has left running. Cut off, it ends it at
        once."""
        process = self._process
        if process is None:
            return
        try:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), grace_s)
        finally:
            # Also where it is gone: its own children share its session, and must not outlive it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            self._process = None
        await process.wait()


def _last_line(log_file: Path) -> str:
    """Where an engine that refuses says why, in one line."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, log_file.stat().st_size - TAIL_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
