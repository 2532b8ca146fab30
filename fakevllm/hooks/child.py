"""The inside of the hook process: imports the user's code, runs its hooks, checks what they return.

Async hooks run concurrently on the main thread's loop, sync hooks one at a time on a second thread,
so user code needs no locks. A third thread reads the socket: it sees the proxy's end even while
user code holds the other two. Frames are a length and JSON; no object of the user's crosses the
socket. The parent's side is process.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import inspect
import os
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Awaitable, Generator
from pathlib import Path
from typing import Any

import orjson

from fakevllm.errors import HookError
from fakevllm.hooks.loader import Hooks, blame, first_line, is_async, load_hooks
from fakevllm.hooks.results import (
    HookFailure,
    Json,
    changed,
    read_plan,
    read_rewards,
    read_value,
)
from fakevllm.hooks.spec import Feedback, Sibling, Task

HEADER = struct.Struct("!I")

EXIT_GRACE_S = 1.0
"""How long user code may hold up the exit once the proxy has hung up."""


def frame(message: Json) -> bytes:
    """Raises TypeError for what is not JSON."""
    body = orjson.dumps(message)
    return HEADER.pack(len(body)) + body


def run(sock: socket.socket, path: str, timeout_s: float, holder: ctypes.c_uint64) -> None:
    """Entry point of the process. `holder` is shared: the call that holds the loop, or 0."""
    # Ctrl-C reaches the whole terminal group; the proxy decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    child = _Child(sock, timeout_s, holder)
    threading.Thread(target=child.listen, daemon=True, name="hook-socket").start()
    # Stays: a hook may import its neighbours when it is called.
    sys.path.insert(0, str(_folder(Path(path))))
    try:
        hooks = load_hooks(Path(path))
    except HookError as error:
        child.send({"error": str(error)})
        return
    asyncio.run(child.serve(hooks))


def _folder(path: Path) -> Path:
    resolved = path.expanduser().resolve()
    return resolved if resolved.is_dir() else resolved.parent


class _Child:
    def __init__(self, sock: socket.socket, timeout_s: float, holder: ctypes.c_uint64) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._holder = holder
        # Keeps the frames of the two answering threads apart.
        self._sending = threading.Lock()
        # Bounded by the parent, which has at most one sync call out.
        self._jobs: queue.SimpleQueue[Json] = queue.SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        # What was raised and where; bounded by the lines of the hook files.
        self._shown: set[tuple[str, str]] = set()

    async def serve(self, hooks: Hooks) -> None:
        self._hooks = hooks
        own = {"submit": hooks.submit, "reward": hooks.reward, "feedback": hooks.feedback}
        self._is_async = {kind: hook is not None and is_async(hook) for kind, hook in own.items()}
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run_sync, daemon=True, name="hook-sync").start()
        self.send(
            {
                "content_hash": hooks.content_hash,
                "has_submit": hooks.submit is not None,
                "has_feedback": hooks.feedback is not None,
                "is_async": self._is_async,
            }
        )
        await self._end.wait()

    def listen(self) -> None:
        """Until the proxy hangs up or dies; then the process ends, whatever user code is doing."""
        # A proxy that was killed may reset the connection, or leave half a frame behind.
        with contextlib.suppress(OSError, struct.error, orjson.JSONDecodeError):
            stream = self._sock.makefile("rb")
            while True:
                (length,) = HEADER.unpack(stream.read(HEADER.size))
                self._dispatch(orjson.loads(stream.read(length)))
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end.set)
        threading.Event().wait(EXIT_GRACE_S)
        os._exit(0)

    def _dispatch(self, call: Json) -> None:
        assert self._loop is not None, (
            "the parent calls after it has read that the hooks are loaded"
        )
        if self._is_async[call["kind"]]:
            self._loop.call_soon_threadsafe(self._begin, call)
        else:
            self._jobs.put(call)

    def _begin(self, call: Json) -> None:
        task = asyncio.ensure_future(self._run_async(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_async(self, call: Json) -> None:
        work = _Work(call, self._hooks, self._shown)
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                value = await _Watched(work.start(), self._holder, call["id"])
            answer = work.returned(value)
        except BaseException as error:  # isolates: SystemExit from a hook must not end the loop
            if limit.expired():
                answer = work.failed(f"hook_timeout: {self._timeout_s:g} s")
            else:
                answer = work.raised(error)
        self.send(answer)

    def _run_sync(self) -> None:
        assert self._loop is not None
        while True:
            work = _Work(self._jobs.get(), self._hooks, self._shown)
            try:
                value = work.start()
                if inspect.isawaitable(value):
                    value = asyncio.run_coroutine_threadsafe(_awaited(value), self._loop).result()
                answer = work.returned(value)
            except BaseException as error:  # isolates: the thread outlives what a hook raises
                answer = work.raised(error)
            self.send(answer)

    def send(self, message: Json) -> None:
        # A proxy that is gone reads nothing; listen() ends the process.
        with self._sending, contextlib.suppress(OSError):
            self._sock.sendall(frame(message))


class _Work:
    """One call of one hook."""

    def __init__(self, call: Json, hooks: Hooks, shown: set[tuple[str, str]]) -> None:
        """`shown`: of which failures a traceback has been printed."""
        self._call = call
        self._shown = shown
        self._hooks = hooks
        self._answers: list[Json] = call.get("answers", [])
        self._before = copy.deepcopy(self._answers)

    def start(self) -> Any:
        """Call the hook: a value, or an awaitable of it."""
        call = self._call
        if call["kind"] == "submit":
            assert self._hooks.submit is not None
            return self._hooks.submit(call["request_id"], Task.model_validate(call["task"]))
        task = Task.model_validate(call["task"])
        if call["kind"] == "feedback":
            assert self._hooks.feedback is not None
            return self._hooks.feedback(Feedback(**call["feedback"], task=task))
        shared = {"task": task, "messages": call["messages"]}
        siblings = [Sibling(**shared, **sibling) for sibling in call["siblings"]]
        arguments = (siblings, list(self._answers), call["question"])
        return self._hooks.reward(*arguments[: self._hooks.reward_arity])

    def returned(self, value: object) -> Json:
        if self._call["kind"] == "submit":
            plan = read_plan(value)
            if isinstance(plan, HookFailure):
                return self.failed(plan.reason)
            overrides = plan.overrides
            return {"id": self._call["id"], "reason": None, "num": plan.num, "overrides": overrides}
        if self._call["kind"] == "feedback":
            number = read_value(value)
            if isinstance(number, HookFailure):
                return self.failed(number.reason)
            return self.failed(None) | {"value": number}
        rewards = read_rewards(value, len(self._before))
        if isinstance(rewards, HookFailure):
            return self.failed(rewards.reason)
        return self.failed(None) | {"rewards": rewards}

    def raised(self, error: BaseException) -> Json:
        place = blame(error, self._hooks.folder)
        failure = type(error).__name__, place
        if failure not in self._shown:
            self._shown.add(failure)
            traceback.print_exception(error)
        return self.failed(f"hook_raised: {first_line(error)} ({place})")

    def failed(self, reason: str | None) -> Json:
        notes = list(map(changed, self._before, self._answers))
        return {"id": self._call["id"], "reason": reason, "rewards": None, "annotations": notes}


class _Watched:
    """Awaits a hook and writes down, step by step, when its code holds the loop.

    After a crash or a hang it tells the parent the culprit from the hooks that were merely waiting.
    """

    def __init__(self, hook: Awaitable[Any], holder: ctypes.c_uint64, call_id: int) -> None:
        self._hook = hook
        self._holder = holder
        self._id = call_id

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._hook.__await__()
        error: BaseException | None = None
        while True:
            self._holder.value = self._id
            try:
                waits_for = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            finally:
                self._holder.value = 0
            error = None
            try:
                yield waits_for
            except BaseException as thrown:  # handed on, as `yield from` does
                error = thrown


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
