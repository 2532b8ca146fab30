"""Record for each call the weight versions that may have sampled the call. The record is needed for
engines that do not report the versions.

While the weights change, new calls wait and are not refused. If a running call does not end within
a time limit, the weights change while it runs. The call is then recorded with the old and the new
version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

WHOLE_CALLS_BOUND_S = 60.0
"""Maximum seconds that new weights wait for running calls if no call of a job may mix two versions.
Calls of apps wait as long if they come meanwhile. A call that runs longer continues with the new
weights, and is not trained."""
ABANDONED_PAUSE_S = 0.05
"""Seconds that `WeightGate.call` waits before it raises GateAbandoned. Callers retry at once until
the next engine runs. Without the wait, their retries would leave the event loop no time to start
that engine."""


@dataclass(slots=True, eq=False)
class CallStamp:
    """The weight versions that may have sampled one call."""

    versions: list[int] = field(default_factory=list[int])
    """Versions that may have sampled a token of the call, oldest first."""
    is_doubtful: bool = False
    """Whether a change of weights failed during the call. Which weights sampled the call is then
    unknown."""
    overlaps_swap: bool = False
    """Whether the call ran during `WeightGate.swap`, in which the engine takes new weights while
    the gate is open. Then only the engine knows which weights sampled the call."""

    @property
    def known_version(self) -> int | None:
        """The version that sampled all tokens of the call so far. None if the call may have tokens
        of several versions, or if it is unknown which weights sampled the call."""
        is_certain = len(self.versions) == 1 and not (self.is_doubtful or self.overlaps_swap)
        return self.versions[0] if is_certain else None


class GateAbandoned(Exception):
    """Error for a call that waits at the gate of an engine that was replaced or stopped. The call
    may try the gate of the next engine."""


class WeightGate:
    """A gate that each call to one engine must pass. While `change` changes the engine's weights,
    the gate is closed. `swap` and `serve_adapter` leave the gate open."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.adapter: str | None = None
        """Name that the engine uses for the adapter with the served weights. None if the served
        weights are those of the engine's model."""
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[CallStamp] = set()
        self.num_begun = 0
        """Number of calls that have passed this gate to the engine."""
        self._is_abandoned = False
        self._is_swapping = False

    @property
    def running(self) -> frozenset[CallStamp]:
        """Stamps of the calls that have passed this gate to the engine and have not ended. A stamp
        records the weight versions of one call."""
        return frozenset(self._running)

    @property
    def num_running(self) -> int:
        """Number of calls that have passed this gate to the engine and have not ended."""
        return len(self._running)

    @asynccontextmanager
    async def call(self) -> AsyncGenerator[CallStamp]:
        """Wait while the engine's weights are changed. Then count a call as running while the
        `with` block runs. Yield a stamp, in which the weight versions of this call are recorded.

        The block must last from the call's first byte to its last byte. Raises GateAbandoned if the
        engine was replaced or stopped.
        """
        while not (self._open.is_set() or self._is_abandoned):
            await self._open.wait()
        if self._is_abandoned:
            await asyncio.sleep(ABANDONED_PAUSE_S)
            raise GateAbandoned
        stamp = CallStamp([self.version], overlaps_swap=self._is_swapping)
        self.num_begun += 1
        self._running.add(stamp)
        self._idle.clear()
        try:
            yield stamp
        finally:
            self._running.discard(stamp)
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def change(
        self, version: int, bound_s: float, prepare: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncGenerator[None]:
        """Make new calls wait while the `with` block changes the engine's weights to `version`.

        Three things happen in order. First, wait until no call is running, but at most `bound_s`
        seconds. Then await the function `prepare`. Then run the block. If the wait or `prepare`
        fails, the weights are unchanged, and the gate for new calls is open or closed as before. If
        the block fails, new calls continue to wait, because the engine's weights are unknown.
        """
        was_open = self._open.is_set()
        self._open.clear()
        try:
            await self.wait_until_idle(bound_s)
            if prepare is not None:
                await prepare()
        except BaseException:  # the weights have not changed yet
            if was_open:
                self._open.set()
            raise
        for stamp in self._running:
            stamp.versions.append(version)
        try:
            yield
        except BaseException:
            for stamp in self._running:
                stamp.is_doubtful = True
            raise
        self.version = version
        self._open.set()

    @asynccontextmanager
    async def drained(self, bound_s: float | None) -> AsyncGenerator[None]:
        """Run the `with` block when no call is running, but wait at most `bound_s` seconds for
        running calls. New calls wait until the block has ended. After the block, the gate is open
        or closed as before. If `bound_s` is None, run the block at once, while calls run and
        begin."""
        if bound_s is None:
            yield
            return
        was_open = self._open.is_set()
        self._open.clear()
        try:
            await self.wait_until_idle(bound_s)
            yield
        finally:
            if was_open or self._is_abandoned:
                self._open.set()

    async def hold(self, bound_s: float) -> None:
        """Make new calls wait until `release` is called or until `change` has changed the weights.
        Wait until no call is running, but at most `bound_s` seconds."""
        self._open.clear()
        await self.wait_until_idle(bound_s)

    def release(self) -> None:
        """Let calls pass again after `hold`, with the same weights as before."""
        self._open.set()

    @contextmanager
    def swap(self, version: int) -> Generator[None]:
        """Set the flag `overlaps_swap` of every call that runs at any time during the `with` block.
        In this block, the caller makes the engine change to the weights of `version`. New calls do
        not wait. Use this method for an engine that itself reports which versions sampled a call.

        If the block fails, it is unknown which weights the engine has. In this case,
        `overlaps_swap` is set for all further calls until a later `swap` succeeds.
        """
        self._is_swapping = True
        for stamp in self._running:
            stamp.overlaps_swap = True
        yield
        self.version = version
        self._is_swapping = False

    def serve_adapter(self, name: str, version: int) -> None:
        """From now on, answer new calls with the weights in the adapter `name`, and record these
        calls with the version `version`. No call has to wait.

        A running call normally keeps the adapter with which it began. But a running call that has
        not been sent yet, or that is sent a second time, may get the new adapter. Therefore the new
        version is recorded for all running calls too.
        """
        for stamp in self._running:
            stamp.versions.append(version)
        self.adapter, self.version = name, version

    def abandon(self) -> None:
        """Mark the engine as replaced or stopped. Calls that wait for new weights, and calls that
        arrive later, fail with GateAbandoned."""
        self._is_abandoned = True
        self._open.set()

    async def wait_until_idle(self, bound_s: float) -> None:
        """Wait until no call runs, but at most `bound_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                await self._idle.wait()
