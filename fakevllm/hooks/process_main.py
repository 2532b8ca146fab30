"""The code that runs inside the hook process. This code imports the user's hook files, runs the
hooks, and checks their return values.

Async hooks run concurrently on the main thread's event loop. Sync hooks run one at a time on a
second thread. Therefore sync hooks need no lock for data that they share. A third thread reads the
socket to the proxy. It notices when the proxy ends, even while user code blocks the other two
threads.

Each message on the socket is a frame: a length, followed by JSON. Only the first frame is not JSON:
it has the hook files, which the proxy has read. Python objects of the user's code are never sent.
The proxy's side of the socket is in hook_process.py.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import inspect
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Awaitable, Generator
from typing import IO, Any

import orjson

from fakevllm.errors import HookError
from fakevllm.hooks.loader import (
    HookFiles,
    Hooks,
    error_location,
    first_line,
    import_hooks,
    importable,
    is_async,
)
from fakevllm.hooks.redacted_output import HookOutput
from fakevllm.hooks.results import (
    HookFailure,
    Json,
    changed_keys,
    read_plan,
    read_rewards,
    read_value,
    valid_utf8,
)
from fakevllm.hooks.sandbox import HookSandbox, kill_group
from fakevllm.hooks.shared_number import SharedNumber
from fakevllm.hooks.spec import Feedback, Sibling, Task

HEADER = struct.Struct("!I")

EXIT_GRACE_S = 1.0
"""Seconds between the moment when the proxy closes the connection and the moment when this process
is killed. Within this time, user code may finish."""


def frame(message: Json) -> bytes:
    """Return the bytes that send a message over the socket between proxy and hook process: the
    length of the message's JSON, then the JSON. Raises TypeError if the message cannot be expressed
    as JSON."""
    body = orjson.dumps(message)
    return HEADER.pack(len(body)) + body


def files_frame(files: HookFiles, privacy: Json) -> bytes:
    """Return the bytes of the first frame (message) that the proxy sends to the hook process. It
    contains the hook files and the redaction settings. If `privacy` is {}, nothing is redacted."""
    body = pickle.dumps((files, privacy))
    return HEADER.pack(len(body)) + body


def run(
    sock: socket.socket,
    timeout_s: float,
    running_call: SharedNumber,
    sandbox: HookSandbox,
) -> None:
    """Serve hook calls until the proxy closes the connection. This function is the entry point of
    the hook process.

    `running_call` is in shared memory, so that the proxy can read it. Its value is the id of the
    hook call whose code is running on the event loop. The value is 0 if no hook code is running
    there.
    """
    sandbox.enter()
    # Ctrl-C reaches the terminal's whole process group; the proxy decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    stream = sock.makefile("rb")
    try:
        (length,) = HEADER.unpack(stream.read(HEADER.size))
        first: tuple[HookFiles, Json] = pickle.loads(stream.read(length))
    except (OSError, struct.error, EOFError, pickle.UnpicklingError):
        return  # the proxy has ended, or does not need this process any more
    files, privacy = first
    output = HookOutput(sys.stderr)
    output.use(privacy)
    child = _Child(sock, stream, timeout_s, running_call, output)
    threading.Thread(target=child.listen, daemon=True, name="hook-socket").start()
    # A hook may import other files of the folder during a call.
    with importable(files):
        try:
            hooks = import_hooks(files)
        except HookError as error:
            child.send({"error": str(error)})
            return
        asyncio.run(child.serve(hooks))
    # SIGKILL would skip the exit handlers of the user's code, such as those that delete files.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    output.end()
    kill_group(os.getpid())  # this process and all that its hooks have started


class _Child:
    """The state of the hook process: the socket to the proxy, the three threads, and the hook calls
    that the threads run."""

    def __init__(
        self,
        sock: socket.socket,
        stream: IO[bytes],
        timeout_s: float,
        running_call: SharedNumber,
        output: HookOutput,
    ) -> None:
        """Create the state. `stream` reads from `sock`, whose first frame was already read."""
        self._sock = sock
        self._output = output
        self._stream = stream
        self._timeout_s = timeout_s
        self._running_call = running_call
        # Two threads send replies; their frames must not mix.
        self._send_lock = threading.Lock()
        # Bounded by the proxy, which sends at most one sync call at a time.
        self._sync_calls: queue.SimpleQueue[Json] = queue.SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        # Type and place of each error whose traceback was printed. Bounded by the lines of the hook
        # files.
        self._printed_errors: set[tuple[str, str]] = set()

    async def serve(self, hooks: Hooks) -> None:
        """Report to the proxy that the hooks are loaded, then run hook calls until the proxy closes
        the connection."""
        self._hooks = hooks
        by_kind = {"submit": hooks.submit, "reward": hooks.reward, "feedback": hooks.feedback}
        self._is_async = {
            kind: hook is not None and is_async(hook) for kind, hook in by_kind.items()
        }
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
        """Receive hook calls. Pass async calls to the event loop, and sync calls to the second
        thread. When the proxy closes the connection or dies, end this process, even if user code is
        still running."""
        # A killed proxy may reset the connection, or leave an incomplete frame.
        with contextlib.suppress(OSError, struct.error, orjson.JSONDecodeError):
            while True:
                (length,) = HEADER.unpack(self._stream.read(HEADER.size))
                self._dispatch(orjson.loads(self._stream.read(length)))
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end.set)
        threading.Event().wait(EXIT_GRACE_S)
        kill_group(os.getpid())

    def _dispatch(self, call: Json) -> None:
        assert self._loop is not None, (
            "the parent sends calls only after it has read that the hooks are loaded"
        )
        self._output.use(call.get("privacy", {}))
        if self._is_async[call["kind"]]:
            self._loop.call_soon_threadsafe(self._start_task, call)
        else:
            self._sync_calls.put(call)

    def _start_task(self, call: Json) -> None:
        task = asyncio.ensure_future(self._run_async(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_async(self, call: Json) -> None:
        hook_call = _HookCall(call, self._hooks, self._printed_errors)
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                value = await _TrackedAwaitable(hook_call.start(), self._running_call, call["id"])
            reply = hook_call.returned(value)
        except BaseException as error:  # isolates: SystemExit from a hook must not end the loop
            if limit.expired():
                reply = hook_call.failed(f"hook_timeout: {self._timeout_s:g} s")
            else:
                reply = hook_call.raised(error)
        self.send(reply)

    def _run_sync(self) -> None:
        assert self._loop is not None
        while True:
            hook_call = _HookCall(self._sync_calls.get(), self._hooks, self._printed_errors)
            try:
                value = hook_call.start()
                if inspect.isawaitable(value):
                    value = asyncio.run_coroutine_threadsafe(_awaited(value), self._loop).result()
                reply = hook_call.returned(value)
            except BaseException as error:  # isolates: a hook's error must not end the thread
                reply = hook_call.raised(error)
            self.send(reply)

    def send(self, message: Json) -> None:
        """Send a message over the socket to the proxy."""
        # If the proxy has ended, sending fails; listen() then ends the process.
        with self._send_lock, contextlib.suppress(OSError):
            self._sock.sendall(frame(message))


class _HookCall:
    """One call of a hook. The methods `returned`, `raised` and `failed` create the reply to the
    proxy."""

    def __init__(self, call: Json, hooks: Hooks, printed_errors: set[tuple[str, str]]) -> None:
        """Create the object for one call of a hook.

        `printed_errors` is shared by all calls. It has one pair (type, location) for each error
        whose traceback was already printed.
        """
        self._call = call
        self._printed_errors = printed_errors
        self._hooks = hooks
        self._answers: list[Json] = call.get("answers", [])
        self._before = copy.deepcopy(self._answers)

    def start(self) -> Any:
        """Call the user's hook, and return its return value. For an async hook, the return value is
        an awaitable."""
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
        """Check the value that the hook returned, and create the reply to the proxy. The reply has
        the checked value, or the reason why the value is not valid."""
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
        """Create the reply to the proxy for a hook that raised an error. If this is the first error
        of this type at this location, also print its traceback."""
        place = error_location(error, self._hooks.folder)
        failure = type(error).__name__, place
        if failure not in self._printed_errors:
            self._printed_errors.add(failure)
            with contextlib.suppress(Exception):  # isolates: a hook may have closed the output
                traceback.print_exception(error)
        return self.failed(f"hook_raised: {first_line(error)} ({place})")

    def failed(self, reason: str | None) -> Json:
        """Create a reply to the proxy without the hook's result. `reason` says why the hook failed.
        If the hook succeeded, `reason` is None, and the caller adds the result to the reply."""
        annotations = list(map(changed_keys, self._before, self._answers))
        return {
            "id": self._call["id"],
            "reason": None if reason is None else valid_utf8(reason),
            "rewards": None,
            "annotations": annotations,
        }


class _TrackedAwaitable:
    """An awaitable around an async hook. While the hook's code is running on the event loop, shared
    memory holds the id of the hook call.

    After a crash or a hang, the proxy reads from the shared memory which call was running and
    therefore caused the failure. Calls that were only waiting, for example for I/O, cannot be the
    cause.
    """

    def __init__(self, hook: Awaitable[Any], running_call: SharedNumber, call_id: int) -> None:
        self._hook = hook
        self._running_call = running_call
        self._id = call_id

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._hook.__await__()
        error: BaseException | None = None
        while True:
            self._running_call.value = self._id
            try:
                waits_for = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            finally:
                self._running_call.value = 0
            error = None
            try:
                yield waits_for
            except BaseException as thrown:  # passed on to the hook, as `yield from` does
                error = thrown


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
