"""Call a script's callbacks once for each weight sync (a training step and the publication of its
weights). The beginning of a sync is detected by polling the server's status."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from fakevllm.sdk.types import SwarmError
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply

log = logging.getLogger("fakevllm.sdk")

POLL_INTERVAL_S = 0.5


class SyncDetector:
    """A detector of weight syncs (training steps with the publication of their weights), without
    I/O. The detector gets the server's statuses in the order in which they were polled.

    A sync that began and ended between two polls is detected too, because the later status has a
    higher training step number.
    """

    def __init__(self) -> None:
        self._last: EngineStatusReply | None = None

    def has_begun(self, status: EngineStatusReply) -> bool:
        """Return True if a weight sync has begun since the previous status. Return False for the
        first status."""
        before, self._last = self._last, status
        if before is None or before.run_id != status.run_id:
            return False
        is_syncing = status.engine_status is EngineStatus.WEIGHT_SYNCING
        was_syncing = before.engine_status is EngineStatus.WEIGHT_SYNCING
        has_stepped = (status.global_step or 0) > (before.global_step or 0)
        return (is_syncing and (has_stepped or not was_syncing)) or (
            has_stepped and not was_syncing
        )


class SyncWatcher:
    """A thread that polls the server's status. When a weight sync (a training step) begins, the
    thread calls each function in `callbacks`."""

    def __init__(self, status: Callable[[], EngineStatusReply]) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self._status = status
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="weight syncs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _poll(self) -> None:
        detector = SyncDetector()
        while not self._stopping.is_set():
            try:
                if detector.has_begun(self._status()):
                    self._call_back()
            except SwarmError as error:
                log.debug("the server's status is not known: %s", error)
            self._stopping.wait(POLL_INTERVAL_S)

    def _call_back(self) -> None:
        for callback in tuple(self.callbacks):
            try:
                callback()
            except Exception:  # an error in one callback must not stop the others
                log.exception("a weight-sync callback failed")
