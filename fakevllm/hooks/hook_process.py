"""The proxy's side of the hook process: start the process, call hooks in it, and end it. The hook
process runs the user's hooks. The code that runs inside the process is in process_main.py.

The process runs async hooks on its event loop, and sync hooks on a second thread. If the process
ends unexpectedly, the cause is one of at most two hook calls. One is the async call whose code was
running on the event loop. The other is the sync call that was running on the second thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import multiprocessing
import signal
import socket
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any, cast

import orjson

from fakevllm.errors import HookError
from fakevllm.hooks.loader import HookFiles
from fakevllm.hooks.process_main import EXIT_GRACE_S, HEADER, files_frame, frame, run
from fakevllm.hooks.results import Json
from fakevllm.hooks.sandbox import HookSandbox, kill_group
from fakevllm.hooks.shared_number import SharedNumber

START_TIMEOUT_S = 120.0
"""Maximum number of seconds for loading the hooks. It is large because a hook file may import a
large package, such as torch from a cold disk."""
EXIT_TIMEOUT_S = EXIT_GRACE_S + 1.0
MAX_REPLY_BYTES = 2**28
"""Maximum size of a reply of the hook process in bytes. The reply for the largest possible group of
answers is smaller."""
NO_REPLY = "hook_crashed: the hook process sent something that is no reply"

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class HookInfo:
    """The hooks that a hook process has loaded.

    >>> HookInfo("9f86d081884c7d65", has_submit=False).has_submit
    False
    """

    content_hash: str
    has_submit: bool
    has_feedback: bool = False


class InvalidReply(Exception):
    """Raised if the hook process has sent bytes that are not a valid reply. A hook can cause this
    error by writing to the socket between its process and the proxy."""


@dataclass(frozen=True, slots=True)
class LostCall:
    """The outcome of a hook call that got no reply because the hook process ended."""

    reason: str
    is_to_blame: bool
    """Whether the process ended because of this call."""


class HookProcess:
    """One hook process, in which the user's hooks run. After a restart, a new object represents the
    new process."""

    info: HookInfo
    is_async: dict[str, bool]
    """Whether the hook is async, for each kind of hook (submit, reward, feedback)."""

    def __init__(
        self,
        process: SpawnProcess,
        running_call: SharedNumber,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.is_dead = False
        self.end = ""
        """Reason why the process ended; "" while it runs."""
        self._process = process
        self._running_call = running_call
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        # By call id. Bounded by the number of the app's open requests.
        self._pending: dict[int, asyncio.Future[Json | LostCall]] = {}
        self._sync_id: int | None = None
        self._listener: asyncio.Task[None] | None = None
        self._is_reaped = False

    @staticmethod
    async def start(
        files: HookFiles, timeout_s: float, sandbox: HookSandbox, privacy: Json
    ) -> HookProcess:
        """Start a hook process, load the hooks in it, and return its HookProcess object. `privacy`
        are the settings for the redaction of what hooks print; {} redacts nothing.

        Raises HookError if the hooks cannot be loaded.
        """
        own_socket, child_socket = socket.socketpair()
        running_call = SharedNumber.zero()
        # Without the files: process.start() writes its arguments into a pipe, and would block the
        # event loop if they did not fit into the pipe's buffer.
        arguments = (child_socket, timeout_s, running_call, sandbox)
        process = _SPAWN.Process(target=run, args=arguments, name="fakevllm-hooks")
        reader, writer = await asyncio.open_connection(sock=own_socket)
        with child_socket, running_call.file:
            _start_ignoring_ctrl_c(process)
        # Without this, an interpreter that exits without close() would wait for the hook process,
        # while the hook process waits for the interpreter.
        self = HookProcess(process, running_call, reader, writer)
        atexit.register(self._kill)
        try:
            await self._load(files, privacy)
        except BaseException:
            await self.close()
            raise
        self._listener = asyncio.ensure_future(self._listen())
        return self

    async def _load(self, files: HookFiles, privacy: Json) -> None:
        path = files.path
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self._writer.write(files_frame(files, privacy))
                await self._writer.drain()
                loaded = await self._read()
        except TimeoutError:
            message = (
                f"{path}: not loaded after {START_TIMEOUT_S:g} s; do slow work inside the hook"
            )
            raise HookError(message) from None
        except (OSError, asyncio.IncompleteReadError, InvalidReply):
            await asyncio.to_thread(self._reap)
            raise HookError(f"{path}: loading it {self._how_it_ended()}; fix the file") from None
        if "error" in loaded:
            raise HookError(loaded["error"])
        self.info = HookInfo(loaded["content_hash"], loaded["has_submit"], loaded["has_feedback"])
        self.is_async = loaded["is_async"]

    async def call(self, call: Json, limit_s: float, timeout_s: float) -> Json | LostCall:
        """Run a hook and return the reply of the hook process. Return a LostCall if the process
        ends before it replies.

        If there is no reply after `limit_s` seconds, the process is killed. In this case, the field
        `reason` of the LostCall names `timeout_s`, the time limit in the user's configuration.
        """
        call_id = next(self._ids)
        if self.is_dead:
            return LostCall("hook_crashed: the hook process is gone", is_to_blame=False)
        reply = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(frame(call | {"id": call_id}))
        except TypeError as error:
            return {"reason": f"hook_input: the request is not JSON: {error}"}
        self._pending[call_id] = reply
        if not self.is_async[call["kind"]]:
            self._sync_id = call_id
        await asyncio.wait([reply], timeout=limit_s)
        if not reply.done():
            culprit = call_id if self._sync_id == call_id else self._running_call.value or call_id
            self._kill()
            # a process that a hook has started may keep the connection open
            self._writer.transport.abort()
            self.end = f"hook_timeout: {timeout_s:g} s"
            self._lose(self.end, {culprit})
        self._sync_id = None if self._sync_id == call_id else self._sync_id
        return reply.result()

    async def close(self) -> None:
        """Close the connection to the hook process, and kill the process if it does not end by
        itself. Pending hook calls fail."""
        if self.is_dead and self._listener is not None:
            # The listener reaps the process, and then names the call because of which it ended.
            await asyncio.wait([self._listener], timeout=2 * EXIT_TIMEOUT_S)
        self._lose("hook_closed: the proxy is stopping", set(self._pending))
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        if self._listener is not None:
            # The listener reads the end of the stream and reaps the process. Two threads must not
            # reap it.
            done, _ = await asyncio.wait([self._listener], timeout=EXIT_TIMEOUT_S)
            if not done:  # a process that a hook has started keeps the connection open
                self._writer.transport.abort()
                await asyncio.wait([self._listener], timeout=2 * EXIT_TIMEOUT_S)
        else:
            await asyncio.to_thread(self._reap)
        atexit.unregister(self._kill)

    async def _listen(self) -> None:
        is_valid = True
        try:
            while True:
                reply = await self._read()
                pending = self._pending.pop(reply.get("id", 0), None)
                if pending is not None and not pending.done():
                    pending.set_result(reply)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the process has ended, or was killed
        except InvalidReply:
            is_valid = False
            self._kill()
        suspects = (self._running_call.value, self._sync_id)
        self.is_dead = True
        await asyncio.to_thread(self._reap)
        crash = f"hook_crashed: the hook {self._how_it_ended()}" if is_valid else NO_REPLY
        self.end = self.end or crash
        self._lose(crash, suspects)

    async def _read(self) -> Json:
        """Read one message from the hook process. Raises InvalidReply if the bytes are not a valid
        message."""
        (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        if length > MAX_REPLY_BYTES:
            raise InvalidReply
        try:
            message: Any = orjson.loads(await self._reader.readexactly(length))
        except orjson.JSONDecodeError:
            raise InvalidReply from None
        if not isinstance(message, dict):
            raise InvalidReply
        reply = cast(Json, message)
        if not isinstance(reply.get("id", 0), int):
            raise InvalidReply
        return reply

    def _reap(self) -> None:
        """Wait until the process has ended, and kill it if it does not end in time. Then kill all
        other processes of its process group. Finally, reap the process. This method blocks."""
        if self._is_reaped:
            return
        wait([self._process.sentinel], EXIT_TIMEOUT_S)  # unlike join, this does not reap
        self._kill()
        self._process.join(EXIT_TIMEOUT_S)
        self._is_reaped = True

    def _kill(self) -> None:
        """Kill the process and all processes in its process group. The process itself is killed
        separately, because it may not have created its process group yet."""
        self._process.kill()
        kill_group(self._process.pid)

    def _lose(self, reason: str, culprits: Collection[int | None]) -> None:
        self.is_dead = True
        for call_id, pending in self._pending.items():
            if not pending.done():
                pending.set_result(LostCall(reason, call_id in culprits))
        self._pending.clear()

    def _how_it_ended(self) -> str:
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"ended its process by {signal.Signals(-code).name}"
        return f"ended its process with exit code {code}"


def _start_ignoring_ctrl_c(process: SpawnProcess) -> None:
    """Start a process that ignores Ctrl-C from the beginning. Without this function, the process
    would print a traceback on Ctrl-C.

    The signal SIGINT is blocked in this thread while the process is started. The new process
    inherits the blocked signal.
    """
    # The tracker must run before SIGINT is blocked, because its start unblocks SIGINT.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
