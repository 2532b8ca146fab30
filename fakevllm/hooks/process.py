"""One life of the hook process, seen from the proxy: start, ask, kill, reap.

When it ended, the call that held its loop or its sync thread is to blame. The inside is child.py.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import itertools
import multiprocessing
import signal
import socket
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path

import orjson

from fakevllm.errors import HookError
from fakevllm.hooks.child import EXIT_GRACE_S, HEADER, frame, run
from fakevllm.hooks.results import Json

START_TIMEOUT_S = 120.0
"""Hook files may import something heavy, such as torch from a cold disk."""
EXIT_TIMEOUT_S = EXIT_GRACE_S + 1.0

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class HookInfo:
    """
    >>> HookInfo("9f86d081884c7d65", has_submit=False).has_submit
    False
    """

    content_hash: str
    has_submit: bool
    has_feedback: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The process ended before it answered."""

    reason: str
    is_to_blame: bool


class HookProcess:
    """One life of the hook process."""

    info: HookInfo
    is_async: dict[str, bool]

    def __init__(
        self,
        process: SpawnProcess,
        holder: ctypes.c_uint64,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.is_dead = False
        self.end = ""
        """Why it ended, once it has."""
        self._process = process
        self._holder = holder
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        # Bounded by the requests the app has open.
        self._waiting: dict[int, asyncio.Future[Json | Lost]] = {}
        self._sync_id: int | None = None
        self._listener: asyncio.Task[None] | None = None

    @staticmethod
    async def start(path: Path, timeout_s: float) -> HookProcess:
        """Raises HookError, with the loader's message where the hooks are at fault."""
        ours, theirs = socket.socketpair()
        holder = _SPAWN.RawValue(ctypes.c_uint64, 0)
        arguments = (theirs, str(path), timeout_s, holder)
        process = _SPAWN.Process(target=run, args=arguments, name="fakevllm-hooks")
        reader, writer = await asyncio.open_connection(sock=ours)
        with theirs:
            _start_deaf_to_ctrl_c(process)
        # An interpreter that exits without close() would wait for this process, and it for us.
        atexit.register(process.kill)
        self = HookProcess(process, holder, reader, writer)
        try:
            await self._load(path)
        except BaseException:
            await self.close()
            raise
        self._listener = asyncio.ensure_future(self._listen())
        return self

    async def _load(self, path: Path) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await self._read()
        except TimeoutError:
            late = f"{path}: not loaded after {START_TIMEOUT_S:g} s; do slow work inside the hook"
            raise HookError(late) from None
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.to_thread(self._process.join, EXIT_TIMEOUT_S)
            raise HookError(f"{path}: loading it {self._how_it_ended()}; mend the file") from None
        if "error" in ready:
            raise HookError(ready["error"])
        self.info = HookInfo(ready["content_hash"], ready["has_submit"], ready["has_feedback"])
        self.is_async = ready["is_async"]

    async def ask(self, call: Json, limit_s: float, timeout_s: float) -> Json | Lost:
        """The answer, or who lost it; after `limit_s` the process is killed."""
        call_id = next(self._ids)
        if self.is_dead:
            return Lost("hook_crashed: the hook process is gone", is_to_blame=False)
        answer = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(frame(call | {"id": call_id}))
        except TypeError as error:
            return {"reason": f"hook_input: the request is not JSON: {error}"}
        self._waiting[call_id] = answer
        if not self.is_async[call["kind"]]:
            self._sync_id = call_id
        await asyncio.wait([answer], timeout=limit_s)
        if not answer.done():
            culprit = call_id if self._sync_id == call_id else self._holder.value or call_id
            self._process.kill()
            self.end = f"hook_timeout: {timeout_s:g} s"
            self._lose(self.end, {culprit})
        self._sync_id = None if self._sync_id == call_id else self._sync_id
        return answer.result()

    async def close(self) -> None:
        """Hang up, wait, kill. Calls in flight are lost."""
        self._lose("hook_closed: the proxy is stopping", set(self._waiting))
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        if self._listener is not None:
            # It reads the end of the stream and reaps the process; two threads must not do that.
            await asyncio.wait([self._listener], timeout=2 * EXIT_TIMEOUT_S)
        else:
            await asyncio.to_thread(self._process.join, EXIT_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join, EXIT_TIMEOUT_S)
        atexit.unregister(self._process.kill)

    async def _listen(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                reply = await self._read()
                answer = self._waiting.pop(reply["id"], None)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        suspects = (self._holder.value, self._sync_id)
        self.is_dead = True
        await asyncio.to_thread(self._process.join, EXIT_TIMEOUT_S)
        crash = f"hook_crashed: the hook {self._how_it_ended()}"
        self.end = self.end or crash
        self._lose(crash, suspects)

    async def _read(self) -> Json:
        (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return orjson.loads(await self._reader.readexactly(length))

    def _lose(self, reason: str, culprits: Collection[int | None]) -> None:
        self.is_dead = True
        for call_id, answer in self._waiting.items():
            if not answer.done():
                answer.set_result(Lost(reason, call_id in culprits))
        self._waiting.clear()

    def _how_it_ended(self) -> str:
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"ended its process by {signal.Signals(-code).name}"
        return f"ended its process with exit code {code}"


def _start_deaf_to_ctrl_c(process: SpawnProcess) -> None:
    """The signal mask is inherited: Ctrl-C during the child's start prints no traceback."""
    # Started here, because starting it lifts the mask.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
