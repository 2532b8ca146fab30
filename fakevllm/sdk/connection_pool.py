"""What only one thread uses at a time: taken, used, put back."""

from __future__ import annotations

import os
import threading
from typing import Generic, TypeVar

from fakevllm.sdk.types import ClientClosed

T = TypeVar("T")

KEPT_S = 5.0
"""How long what nobody takes is kept, as httpx keeps an idle connection."""


class Spare(Generic[T]):
    """Thread-safe. What was put back last is taken first, so what is too many grows old. A process
    that is forked begins without: two of them would talk over one connection."""

    def __init__(self) -> None:
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._kept: list[tuple[T, float]] = []
        """With when it was put back, oldest first."""
        self._lock = threading.Lock()

    def take(self) -> T | None:
        """None where there is none, and one must be made. Raises ClientClosed after `close`."""
        if os.getpid() != self._pid:
            self._begin()
        with self._lock:
            if self._is_closed:
                raise ClientClosed("The client is closed.")
            return self._kept.pop()[0] if self._kept else None

    def put_back(self, one: T, now: float) -> list[T]:
        """Those that are to be closed: too old, or after `close` this one too."""
        with self._lock:
            if self._is_closed:
                return [one]
            self._kept.append((one, now))
            num_old = sum(now - since > KEPT_S for _, since in self._kept)
            old, self._kept = self._kept[:num_old], self._kept[num_old:]
            return [kept for kept, _ in old]

    def close(self) -> list[T]:
        """Those that are to be closed."""
        with self._lock:
            self._is_closed = True
            kept, self._kept = self._kept, []
            return [one for one, _ in kept]
