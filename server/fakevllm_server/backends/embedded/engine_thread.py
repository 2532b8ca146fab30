"""The engine thread. It is the only thread that runs the model.

The thread samples the tokens of requests and runs tasks. A task is a generator for longer work,
such as a training step or a publish of new weights. Tasks run one after another, in parts. Each
iteration of the thread takes new requests and tasks from the inbox, and samples one token for every
running request. After that, the thread may run the next part of the current task. The constant
DECODE_SHARE sets how sampling and the task share the thread's time while requests are running.

The thread may also serve further policies, which are sets of weights beside the trained weights. In
each iteration, the thread serves the policies one after another: it samples one token for every
running request of each policy.

After sampling, the thread passes the new tokens to the event loops of the requests, with one call
per event loop. The tokens of a request that is not streamed are passed on when the request has
finished. An error in a task is raised in the caller of the task. An error during sampling ends the
process, because the state of the running requests is then unknown.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from fakevllm_adapters.protocol.errors import (
    WireError,
    internal_error,
    unavailable,
    unknown_model,
)
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_server.backends.embedded.decode.request import DecodeRequest, TokenStream
from fakevllm_server.backends.embedded.decode.sampling_state import SamplingState
from fakevllm_server.types.backend import BackendError
from fakevllm_server.types.sampling import Token

IDLE_WAIT_S = 1.0
"""Maximum seconds that an idle thread waits for new items. A new item ends the wait at once."""
DECODE_SHARE = 1.0
"""After each part of a task, the thread runs no other part for some time, and only samples tokens.
DECODE_SHARE is this time, divided by the time that the part took. At 1, sampling and training each
get half of the thread's time while both have work. If the thread sampled only one token after each
micro-batch of a training step, a reply would take as long as the whole step."""
CRASH_GRACE_S = 0.5
"""Seconds between a crash of the thread and the end of the process. During this time, the running
requests receive an error."""
CRASH_EXIT_CODE = 70

Task = Generator[None, None, Any]
Delivery = tuple[TokenStream, list[Token], bool]


@dataclass(frozen=True, slots=True)
class PolicyDecodeRequest:
    """A request for a further policy, whose weights differ from the trained weights."""

    request: DecodeRequest
    policy: str


class EngineThread:
    def __init__(self, state: SamplingState, num_threads: int) -> None:
        self.state = state
        self._policies: dict[str, SamplingState] = {}
        """The sampling states of the further policies (weights beside the trained weights), by
        policy name. Only the engine thread changes this dict."""
        self._retired: list[SamplingState] = []
        """The sampling states of unloaded policies that still have waiting or running requests."""
        self._num_threads = num_threads
        # The inbox needs no maximum length: the engine limits the number of requests before it
        # submits one, and all tasks come from one server.
        self._inbox: queue.SimpleQueue[
            DecodeRequest | PolicyDecodeRequest | tuple[Callable[[], Task], Future[Any]] | None
        ] = queue.SimpleQueue()
        self._tasks: deque[tuple[Callable[[], Task], Future[Any]]] = deque()
        self._task: tuple[Task, Future[Any]] | None = None
        self._decode_until = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: DecodeRequest, policy: str | None = None) -> None:
        """Queue a request for decoding. The tokens are sampled with the trained weights if `policy`
        is None, and otherwise with the weights of the further policy `policy`. Any thread may call
        this method. Raises WireError (503) if the engine is closed."""
        if self._closing:
            raise _shutting_down()
        self._inbox.put(request if policy is None else PolicyDecodeRequest(request, policy))

    def add_policy(self, name: str, state: SamplingState) -> None:
        """Accept requests for a further policy (weights beside the trained weights). `state` is the
        SamplingState that decodes these requests. Call this method from a task on the engine
        thread."""
        self._policies[name] = state

    def remove_policy(self, name: str) -> None:
        """Accept no more requests for a further policy (weights beside the trained weights).
        Requests that are already waiting or running still finish normally. Call this method from a
        task on the engine thread."""
        state = self._policies.pop(name, None)
        if state is not None:
            self._retired.append(state)

    def run(self, start: Callable[[], Task]) -> Future[Any]:
        """Queue a task, and return a future of its result. A task is a generator for longer work on
        the engine thread, such as a training step. The engine thread calls `start()`, which returns
        the generator. Any thread may call this method."""
        future: Future[Any] = Future()
        self._inbox.put((start, future))
        return future

    def close(self) -> None:
        """Stop the engine thread, and wait until it has ended. Running requests end with an
        error."""
        self._closing = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _main(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while not self._closing:
                self._receive()
                with torch.inference_mode():
                    for state in self._states:
                        self._deliver(state.run_iteration())
                self._retired = [state for state in self._retired if state.has_work]
                self._advance_task()
        # The state of the running requests is unknown, so this process must not answer any more.
        # The supervisor starts a new process.
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            self._fail_all(internal_error(), BackendError("the engine thread crashed"))
            time.sleep(CRASH_GRACE_S)
            os._exit(CRASH_EXIT_CODE)
        self._fail_all(_shutting_down(), BackendError("the engine is shutting down"))
        if self._task is not None:
            # The task's clean-up needs torch, so it must run before the interpreter shuts down.
            self._task[0].close()

    @property
    def _states(self) -> list[SamplingState]:
        return [self.state, *self._policies.values(), *self._retired]

    def _receive(self) -> None:
        has_work = any(state.has_work for state in self._states)
        is_idle = self._task is None and not self._tasks and not has_work
        while True:
            try:
                item = self._inbox.get(block=is_idle, timeout=IDLE_WAIT_S)
            except queue.Empty:
                return
            is_idle = False
            if isinstance(item, DecodeRequest):
                self.state.scheduler.add(item)
            elif isinstance(item, PolicyDecodeRequest):
                self._add_to_policy(item)
            elif item is not None:
                self._tasks.append(item)

    def _add_to_policy(self, item: PolicyDecodeRequest) -> None:
        state = self._policies.get(item.policy)
        if state is not None:
            state.scheduler.add(item.request)
        elif item.request.stream is not None:  # the policy was unloaded a moment ago
            error = unknown_model(item.policy, "see /v1/models")
            _call(item.request.stream.loop, item.request.stream.fail, error)

    def _deliver(self, advanced: list[DecodeRequest]) -> None:
        by_loop: dict[AbstractEventLoop, list[Delivery]] = {}
        for request in advanced:
            stream = request.stream
            if stream is None or not (request.finished or request.sampling.live):
                continue
            by_loop.setdefault(stream.loop, []).append(
                (stream, request.undelivered, request.finished)
            )
            request.undelivered = []
        for loop, deliveries in by_loop.items():
            _call(loop, _hand_over, deliveries)

    def _advance_task(self) -> None:
        if self._task is None:
            if not self._tasks:
                return
            start, future = self._tasks.popleft()
            if not future.set_running_or_notify_cancel():
                return
            self._task = start(), future
        if (
            any(state.rows_running for state in self._states)
            and time.monotonic() < self._decode_until
        ):
            return
        task, future = self._task
        started = time.monotonic()
        try:
            next(task)
        except StopIteration as stop:
            self._task = None
            future.set_result(stop.value)
        # A training failure is reported to the caller and never stops serving.
        except Exception as error:
            traceback.print_exc()
            self._task = None
            future.set_exception(
                error if isinstance(error, BackendError) else _as_backend_error(error)
            )
        now = time.monotonic()
        self._decode_until = now + DECODE_SHARE * (now - started)

    def _fail_all(self, request_error: Exception, task_error: Exception) -> None:
        requests = [request for state in self._states for request in state.all_requests()]
        futures = [future for _, future in self._tasks] + ([self._task[1]] if self._task else [])
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, DecodeRequest):
                requests.append(item)
            elif isinstance(item, PolicyDecodeRequest):
                requests.append(item.request)
            elif item is not None:
                futures.append(item[1])
        for request in requests:
            if request.stream is not None:
                _call(request.stream.loop, request.stream.fail, request_error)
        for future in futures:
            if not future.done():
                future.set_exception(task_error)


def _hand_over(deliveries: list[Delivery]) -> None:
    for stream, tokens, is_last in deliveries:
        stream.put(tokens, is_last)


def _call(loop: AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    # The event loop may be closed; then nothing waits for the result.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


def _shutting_down() -> WireError:
    return unavailable("The engine is shutting down.", OutageReason.ENGINE_FAILED)


def _as_backend_error(error: Exception) -> BackendError:
    return BackendError(f"{type(error).__name__}: {error}")
