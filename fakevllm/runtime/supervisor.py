"""Run child processes for a command of fakevllm, and restart each process when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fakevllm.errors import FakevllmError, UserError

STOP_GRACE_S = 120.0
"""Maximum number of seconds that a process may take to stop after SIGTERM. In this time, a swarm
server finishes its current step, saves a checkpoint, and closes its engine."""
MAX_RESTARTS = 20
MIN_START_INTERVAL_S = 2.0
"""Minimum number of seconds between two starts of a process. Without this minimum, a process that
dies at once would be restarted in a tight loop."""


class SupervisedProcess:
    """A child process that is restarted whenever it dies.

    The child's stdin is a pipe from the parent process. When the parent ends, the pipe closes, and
    the child stops by itself.

    The parent opens the socket on which the child listens, and keeps it open while the child is
    restarted. Therefore no other process can take the port. A client that connects during a restart
    waits, and is not refused.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log_file: Path,
        listener: socket.socket,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Create the object. `environment` has the environment variables that the child process
        gets in addition to those of this process."""
        self.name = name
        self.num_restarts = 0
        fd = str(listener.fileno())
        self._command = [sys.executable, "-m", module, *arguments, "--listen-fd", fd]
        self._command += ["--until-stdin-closes"]
        self._listener = listener
        self._log_file = log_file
        self._environment = environment or {}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run(self, on_restart: Callable[[str], None]) -> None:
        """Keep the child process running until this method is cancelled. After each restart, call
        `on_restart` with a log line about the restart.

        Raises FakevllmError after MAX_RESTARTS restarts. Also raises FakevllmError if the process
        exits with code 2, because this code means that its settings are invalid.
        """
        loop = asyncio.get_running_loop()
        try:
            while True:
                started = loop.time()
                code = await self._run_once()
                if self.num_restarts >= MAX_RESTARTS or code == 2:
                    raise FakevllmError(
                        f"{self.name} does not stay up (exit code {code}): {self._last_line()} "
                        f"(see {self._log_file})"
                    )
                self.num_restarts += 1
                on_restart(f"{self.name} died (exit code {code}) and was started again")
                await asyncio.sleep(max(0.0, MIN_START_INTERVAL_S - (loop.time() - started)))
        finally:
            await self._stop()

    async def _run_once(self) -> int:
        with self._log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[self._listener.fileno()],
                env=os.environ | self._environment,
            )
        return await self._process.wait()

    def _last_line(self) -> str:
        """Return the last line of the process's log. If the process refused its settings, this line
        contains the reason."""
        lines = self._log_file.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "its log is empty"

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def supervise(
    processes: Sequence[SupervisedProcess], on_restart: Callable[[str], None]
) -> AsyncGenerator[None]:
    """Keep the processes running while the `async with` block runs.

    At the end, the processes are stopped one after the other, in reverse order. Therefore a process
    can still receive messages that the processes after it send while they stop. If a process cannot
    be kept running, the block is cancelled and a FakevllmError is raised.
    """
    body = asyncio.current_task()
    assert body is not None
    runs = [asyncio.create_task(process.run(on_restart)) for process in processes]

    def cancel_body(run: asyncio.Task[None]) -> None:
        if not run.cancelled():
            body.cancel()

    for run in runs:
        run.add_done_callback(cancel_body)
    try:
        yield
    except asyncio.CancelledError:
        for run in runs:
            if run.done() and (error := run.exception()) is not None:
                raise error from None
        raise
    finally:
        for run in runs:
            run.remove_done_callback(cancel_body)
        for run in reversed(runs):
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)


def make_run_folder(folder: Path, setting: str) -> None:
    """Create the run folder. Only its owner can read the folder, because it contains requests and
    answers.

    Raises UserError if the folder cannot be created. The message contains `setting`, the name of
    the flag or configuration key that the user must change.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(
            f"The run folder {folder} cannot be used ({error.strerror}): name another {setting}."
        ) from None
