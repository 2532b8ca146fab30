"""Follows a server's status for those who want to hear of each weight sync."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from fakevllm.client.errors import SwarmError
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply

log = logging.getLogger("fakevllm.client")

LOOK_EVERY_S = 0.5


class Syncs:
    """Counts the weight syncs that begin, by what a poll sees. Pure.

    A sync that was shorter than the time between two looks is known by the step that grew.
    """

    def __init__(self) -> None:
        self._last: EngineStatusReply | None = None

    def begun(self, seen: EngineStatusReply) -> bool:
        """Whether one has begun since the last look. The first look tells nothing."""
        before, self._last = self._last, seen
        if before is None or before.run_id != seen.run_id:
            return False
        is_syncing = seen.engine_status is EngineStatus.WEIGHT_SYNCING
        was_syncing = before.engine_status is EngineStatus.WEIGHT_SYNCING
        stepped = (seen.global_step or 0) > (before.global_step or 0)
        return (is_syncing and (stepped or not was_syncing)) or (stepped and not was_syncing)


class Watch:
    """The thread around `Syncs`."""

    def __init__(self, status: Callable[[], EngineStatusReply]) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self._status = status
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="weight syncs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _follow(self) -> None:
        syncs = Syncs()
        while not self._stopping.is_set():
            try:
                if syncs.begun(self._status()):
                    self._tell()
            except SwarmError as error:
                log.debug("the server's status is not known: %s", error)
            self._stopping.wait(LOOK_EVERY_S)

    def _tell(self) -> None:
        for callback in tuple(self.callbacks):
            try:
                callback()
            except Exception:  # isolates: one caller's mistake is not the others'
                log.exception("a weight-sync callback failed")
