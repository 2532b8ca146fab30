"""A pool of idle HTTP clients, each of which only one thread or task uses at a time."""

from __future__ import annotations

import os
import threading
from typing import Generic, TypeVar

from fakevllm.sdk.types import ClientClosed

T = TypeVar("T")

MAX_IDLE_S = 5.0
"""Seconds an idle client is kept, as long as httpx keeps an idle connection."""


class ConnectionPool(Generic[T]):
    """Idle clients to take, use and put back. Safe to use from any thread.

    The client that was put back last is taken first, so that surplus clients age and are closed. A
    forked process starts with an empty pool, because two processes cannot share a connection.
    """

    def __init__(self) -> None:
        self._is_closed = False
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._idle: list[tuple[T, float]] = []
        """Clients and the times when they were put back, oldest first."""
        self._lock = threading.Lock()

    def take(self) -> T | None:
        """Return an idle client, or None if the caller must create one.

        Raises ClientClosed after `close`.
        """
        if os.getpid() != self._pid:
            self._reset()
        with self._lock:
            if self._is_closed:
                raise ClientClosed("The client is closed.")
            return self._idle.pop()[0] if self._idle else None

    def put_back(self, client: T, now: float) -> list[T]:
        """Put a client back, and return the clients that the caller must close.

        These are the clients that were idle for too long; after `close`, it is `client` itself.
        """
        with self._lock:
            if self._is_closed:
                return [client]
            self._idle.append((client, now))
            num_old = sum(now - since > MAX_IDLE_S for _, since in self._idle)
            old, self._idle = self._idle[:num_old], self._idle[num_old:]
            return [idle for idle, _ in old]

    def close(self) -> list[T]:
        """Close the pool, and return the clients that the caller must close."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            return [client for client, _ in idle]
