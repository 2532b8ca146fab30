"""Threads that parse, check and tokenize requests. The event loop therefore stays free for other
work, for example for /health.

Tokenizing a long prompt takes seconds. Therefore there are two threads: one for requests with short
bodies, and one for requests with long bodies. A long prompt then delays only other long prompts.
Each thread handles its requests in order of arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fakevllm_adapters.protocol.errors import unavailable
from fakevllm_adapters.protocol.outage_reasons import OutageReason

Result = TypeVar("Result")

LONG_BODY_BYTES = 64 * 2**10
"""A request body of this many bytes or more is a long body. The preparation of a shorter body takes
at most about 0.1 s."""
MAX_PREPARING = 4096
"""Maximum number of requests that are being prepared or wait for preparation. Further requests get
status 503. Without a maximum, the queue could become so long that every request in it times out."""


class PreparationThreads:
    """Two threads that parse and check requests: one for short bodies, and one for long bodies."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, "prepare-short")
        self._long = ThreadPoolExecutor(1, "prepare-long")
        self._num_preparing = 0

    async def run(self, num_bytes: int, function: Callable[[], Result]) -> Result:
        """Run `function`, which parses and checks one request, and return its result. The size of
        the body, `num_bytes`, decides which of the two threads runs `function`.

        If this call is cancelled while the request waits in the thread's queue, the request is
        removed from the queue. Raises WireError (503) if too many requests wait.
        """
        if self._num_preparing >= MAX_PREPARING:
            raise unavailable("Too many requests are waiting.", OutageReason.ENGINE_BUSY)
        thread = self._short if num_bytes < LONG_BODY_BYTES else self._long
        self._num_preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, function)
        finally:
            self._num_preparing -= 1

    def close(self) -> None:
        """Stop both threads that parse requests. Do not wait for a request that is being parsed."""
        for thread in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)
