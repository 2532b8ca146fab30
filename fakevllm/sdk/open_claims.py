"""The open claims of a client, which are aborted when the client is closed or its script ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from fakevllm.sdk import episode_calls
from fakevllm.sdk.access import EpisodeAccess
from fakevllm.sdk.http_driver import HttpDriver
from fakevllm.sdk.types import ClientClosed, SwarmError

ABORT_LIMIT_S = 2.0
"""Seconds to abort all claims. A user who presses Ctrl-C wants the script to end at once, and the
server aborts the remaining claims when they expire."""


class OpenClaims:
    """The claims of `with client.episode(…)` blocks.

    A claim from `begin_episode` alone is not among them, because it may go on in another process.
    """

    def __init__(self, driver: HttpDriver, client_uuid: str) -> None:
        self._driver = driver
        self._client_uuid = client_uuid
        self._uuids: set[str] = set()
        self._num_pending = 0
        """Number of claims that were requested and may be granted any moment."""
        self._is_closed = False
        self._changed = threading.Condition()
        self._pid = os.getpid()

    def open(self, begin: Callable[[], tuple[str, EpisodeAccess]]) -> tuple[str, EpisodeAccess]:
        """Call `begin`, and keep its claim until `release`. Raises ClientClosed after
        `abort_all`."""
        with self._changed:
            if self._is_closed:
                raise ClientClosed("The client is closed.")
            self._num_pending += 1
        try:
            claim = begin()
            self._uuids.add(claim[0])
            return claim
        finally:
            with self._changed:
                self._num_pending -= 1
                self._changed.notify_all()

    def release(self, uuid: str) -> None:
        self._uuids.discard(uuid)

    def abort_all(self) -> None:
        """Abort all open claims, and refuse new ones. Never raises.

        Otherwise the server would wait until each claim expires, and a script that is edited and
        started again would wait with it.
        """
        if os.getpid() != self._pid:  # the end of a forked process is not its parent's
            return
        limit = time.monotonic() + ABORT_LIMIT_S
        with self._changed:
            self._is_closed = True
            self._driver.end_waits()
            self._changed.wait_for(lambda: not self._num_pending, ABORT_LIMIT_S / 2)
        for uuid in tuple(self._uuids):
            left_s = limit - time.monotonic()
            if left_s <= 0:
                return
            try:
                self._driver.run(episode_calls.abort_once(self._client_uuid, uuid, left_s))
            except SwarmError:  # the script ends: nobody could handle the error
                return
