"""Start, watch and stop a child process of the server, and describe how it exited.

The child runs in a session of its own. Therefore Ctrl-C reaches only the server, which then stops
the child. For the same reason, the server can kill the child together with all processes that the
child has started. The child's standard input is a pipe from the server. A child must exit when this
pipe closes, so that no engine survives a killed server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from fakevllm_runtime.engines import BOOT_TIMEOUT_S
from fakevllm_server.types.backend import BackendError, BackendRefused

STOP_GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
PASSING_ERRORS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT),
        *(errno.EMFILE, errno.ENFILE),
        *(errno.ENOMEM, errno.EAGAIN),
    }
)
"""Errors of a system that is short of disk space, files, memory or processes. A later start may
succeed."""
REFUSED_EXIT_CODE = 2
"""Exit code of an engine that cannot start until the user fixes the cause."""
ENDS = "ends: "
"""Text after the name of an engine at the beginning of the line with which the engine logs why it
exits. The server repeats the rest of the line."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes that show a SIGKILL: the code of a killed process, and the code of a shell whose
command was killed."""
POLL_INTERVAL_S = 0.05
"""Seconds between two checks whether a started process is ready."""
TAIL_BYTES = 4096
"""Number of bytes at the end of the log file that are read to find the last line."""


class ChildProcess:
    """A child process with a log file, and a name for messages. After the process has ended,
    `start` can start a new one. Only one process runs at a time."""

    def __init__(self, name: str, log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        self.log_start = 0
        """Size of the log when the newest process was started. Before this position are the lines
        of earlier processes."""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Stop the running process, if there is one, and start a new one.

        Raises BackendRefused if the program cannot be executed. Raises BackendError if the system
        currently lacks memory, disk space, open files or process ids.
        """
        await self.close()
        try:
            with self.log_file.open("ab") as log:
                self.log_start = log.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=env,
                )
        except OSError as error:
            message = f"{self.name} cannot be started: {command[0]}: {error.strerror}"
            kind = BackendError if error.errno in PASSING_ERRORS else BackendRefused
            raise kind(message) from None

    async def wait_until_ready(
        self, ready: Callable[[], Awaitable[bool]], timeout_s: float | None = None
    ) -> None:
        """Wait until the process is ready. It is ready when `ready` returns True.

        Raises BackendRefused if the process exits with REFUSED_EXIT_CODE. Raises BackendError if
        the process exits with another code, or if it is not ready after `timeout_s` seconds. If
        `timeout_s` is None, the timeout is BOOT_TIMEOUT_S.
        """
        assert self._process is not None, "start first"
        limit_s = BOOT_TIMEOUT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not await ready():
            if self._process.returncode is not None:
                refused = self._process.returncode == REFUSED_EXIT_CODE
                raise (BackendRefused if refused else BackendError)(await self.lost())
            if time.monotonic() > deadline:
                raise BackendError(
                    f"{self.name} was not ready after {limit_s:.0f} s; see {self.log_file}"
                )
            await asyncio.sleep(POLL_INTERVAL_S)

    async def lost(self) -> str:
        """Wait until the process has exited. Return a message with the process's exit code. If the
        cause is known, the message names it."""
        assert self._process is not None, "start first"
        log_start = self.log_start
        code = await self._process.wait()
        message = f"{self.name} exited with code {code}"
        if code in KILLED:
            message += " (killed: out of memory?)"
        # Without any other line of the log: apps see this message, and the line may be of a
        # traceback.
        start = "" if code == REFUSED_EXIT_CODE else f"{self.name} {ENDS}"
        reason = _last_line(self.log_file, log_start, start)
        return f"{message}: {reason}" if reason else f"{message}; see {self.log_file}"

    async def exit_message(self, within_s: float) -> str | None:
        """Return the message of `lost` if the process exits within `within_s` seconds, or has
        exited already. Otherwise return None."""
        if self._process is None:
            return None
        try:
            return await asyncio.wait_for(self.lost(), within_s)
        except TimeoutError:
            return None

    async def close(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop the process with SIGTERM. If the process still runs after `grace_s` seconds, kill it
        with SIGKILL. Also kill all other processes of its process group.

        If the call is cancelled while it waits, kill all these processes immediately.
        """
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
            # Also after the process has exited: its own child processes are in its process group
            # and must not survive it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            self._process = None
        await process.wait()


def _last_line(log_file: Path, log_start: int, start: str = "") -> str:
    """Return the last line of the log that is not empty and that begins with `start`, without this
    beginning. Only the lines after the position `log_start` count. Return "" if there is none. If
    an engine refuses to start, the last line contains the reason."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(log_start, log_file.stat().st_size - TAIL_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    starting = (line.strip() for line in reversed(lines) if line.startswith(start))
    return next((line.removeprefix(start) for line in starting if line), "")
