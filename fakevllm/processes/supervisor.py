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
from typing import NoReturn

from fakevllm.errors import FakevllmError, UserError
from fakevllm.processes.output import ProcessOutput
from fakevllm.processes.restart_policy import BAD_SETTINGS_CODE, RestartPolicy

STOP_GRACE_S = 120.0
"""Maximum number of seconds that a process may take to stop after SIGTERM. In this time, a swarm
server finishes its current step, saves a checkpoint, and closes its engine."""
_PROGRAMS = ("fakevllm", "fakevllm-server")
"""Names with which the error messages of programs begin."""


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
        output: ProcessOutput,
        listener: socket.socket,
        environment: Mapping[str, str] | None = None,
        *,
        is_essential: bool = True,
    ) -> None:
        """Create the object. `environment` has the environment variables that the child process
        gets in addition to those of the parent process. If `is_essential` is False, the other child
        processes go on when this child dies again and again."""
        self.name = name
        self.num_restarts = 0
        fd = str(listener.fileno())
        self._command = [sys.executable, "-m", module, *arguments, "--listen-fd", fd]
        self._command += ["--until-stdin-closes"]
        self._listener = listener
        self._output = output
        self._policy = RestartPolicy()
        self._environment = environment or {}
        self._process: asyncio.subprocess.Process | None = None
        self._is_killed = False
        self.is_given_up = False
        """Whether the process is not essential, died again and again, and is not started again."""
        self._is_essential = is_essential

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def kill(self) -> None:
        """If the process runs, kill it and its child processes. Never start the process again."""
        self._is_killed = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def run(self, on_restart: Callable[[str], None]) -> None:
        """Keep the process running until this method is cancelled. Before each restart, call
        `on_restart` with a log line about the restart.

        Raises UserError if the process refuses its settings. Raises FakevllmError if the process
        dies again and again. A process that is not essential raises an error only if it refuses its
        settings at its first start. In all other cases, `on_restart` gets the error message, and
        the process is not started again.
        """
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._policy.record_start(loop.time())
                code = await self._run_once()
                if self._is_killed:
                    await _wait_until_cancelled()
                pause_s = self._policy.pause_after_death(code, loop.time())
                if pause_s is None:
                    failure = self._failure(code)
                    is_refusal = code == BAD_SETTINGS_CODE and not self.num_restarts
                    if self._is_essential or is_refusal:
                        raise failure
                    self.is_given_up = True
                    self._listener.close()  # clients are refused, and do not wait
                    on_restart(f"{failure}; everything else goes on")
                    await _wait_until_cancelled()
                self.num_restarts += 1
                later = f" in {pause_s:.0f} s" if pause_s else ""
                on_restart(f"{self.name} died (exit code {code}) and is started again{later}")
                await asyncio.sleep(pause_s)
                if self._is_killed:
                    await _wait_until_cancelled()
        finally:
            await self._stop()

    async def _run_once(self) -> int:
        fd = self._output.open()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=fd,
                stderr=fd,
                start_new_session=True,
                pass_fds=[self._listener.fileno()],
                env=os.environ | self._environment,
            )
        finally:
            os.close(fd)
        if self._is_killed:  # meanwhile
            self.kill()
        code = await self._process.wait()
        await asyncio.to_thread(self._output.finish)
        return code

    def _failure(self, code: int) -> FakevllmError:
        reason = self._output.last_line()
        for program in _PROGRAMS:
            reason = reason.removeprefix(f"{program}: ")
        kind = UserError if code == BAD_SETTINGS_CODE else FakevllmError
        return kind(f"{self.name} does not stay up (exit code {code}): {reason}{self._output.hint}")

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            self.kill()
            await process.wait()
        await asyncio.to_thread(self._output.finish)


async def _wait_until_cancelled() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


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
