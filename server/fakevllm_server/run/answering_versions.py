"""The versions of a run that answer apps, as proxies have requested them. Their checkpoints are
kept, because the engine needs them again when it is started again. This module does no I/O.

The history of releases has the released version. It does not have the baseline of a proxy without a
gate, which makes no decision. Such a proxy requests the version again and again, and this is all
that the server knows about it. Nothing of it is on disk: after a restart of the server, the proxy
requests the version again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

KEPT_S = 600.0
"""Seconds for which the checkpoint of a version is kept after the last request. A proxy requests a
version each minute."""


class AnsweringVersions:
    """The versions that proxies have requested lately for their apps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requested_at: dict[int, float] = {}

    def requested(self, version: int) -> None:
        """Record that a proxy has loaded a version for its apps."""
        self._requested_at[version] = self._clock()

    def unloaded(self, version: int) -> None:
        """Record that a version answers apps no more."""
        self._requested_at.pop(version, None)

    def versions(self) -> set[int]:
        """Return the versions whose checkpoints are kept."""
        now = self._clock()
        self._requested_at = {
            version: at for version, at in self._requested_at.items() if now - at < KEPT_S
        }
        return set(self._requested_at)
