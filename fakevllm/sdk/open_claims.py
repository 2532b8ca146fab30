"""The claims of blocks that run now, given up when their script ends in the middle of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from fakevllm.sdk import episode_calls
from fakevllm.sdk.access import EpisodeAccess
from fakevllm.sdk.http_driver import Driver
from fakevllm.sdk.types import ClientClosed, SwarmError

GIVE_UP_S = 2.0
"""For all of them: who presses Ctrl-C wants the end at once, and the server gives up by itself what
is left."""


class OpenClaims:
    """Only those of blocks: a claim that was begun without one may go on in another process."""

    def __init__(self, driver: Driver, client_uuid: str) -> None:
        self._driver = driver
        self._client_uuid = client_uuid
        self._uuids: set[str] = set()
        self._num_beginning = 0
        """Their claims may be granted any moment."""
        self._is_over = False
        self._changed = threading.Condition()
        self._pid = os.getpid()

    def begin(self, begin: Callable[[], tuple[str, EpisodeAccess]]) -> tuple[str, EpisodeAccess]:
        """What `begin` returns, held until `let_go`. Raises ClientClosed after `give_up`."""
        with self._changed:
            if self._is_over:
                raise ClientClosed("The client is closed.")
            self._num_beginning += 1
        try:
            begun = begin()
            self._uuids.add(begun[0])
            return begun
        finally:
            with self._changed:
                self._num_beginning -= 1
                self._changed.notify_all()

    def let_go(self, uuid: str) -> None:
        self._uuids.discard(uuid)

    def give_up(self) -> None:
        """Else the server would wait for each, and a script that is edited and started again would
        wait with it. Never raises."""
        if os.getpid() != self._pid:  # a fork's end is not its parent's
            return
        limit = time.monotonic() + GIVE_UP_S
        with self._changed:
            self._is_over = True
            self._driver.end_waits()
            self._changed.wait_for(lambda: not self._num_beginning, GIVE_UP_S / 2)
        for uuid in tuple(self._uuids):
            left_s = limit - time.monotonic()
            if left_s <= 0:
                return
            try:
                self._driver.run(episode_calls.give_up(self._client_uuid, uuid, left_s))
            except SwarmError:  # isolated: nobody is there to hear it
                return
