"""The releases of the swarm server: their history, and the decisions of an operator.

All browser pages share one cached history. The methods block the calling thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fakevllm.errors import UserError
from fakevllm.sdk.release_requests import DecisionTarget, ReleaseRequests
from fakevllm_adapters.protocol.releases import ReleaseRecord, ReleasesReply

MAX_AGE_S = 4.0
"""Seconds for which a reply of the server is shown before the server is asked again."""
MAX_WAIT_S = 20.0
"""Seconds for which a decision is repeated while the server is busy or away. A browser waits for
the page meanwhile."""


@dataclass(frozen=True, slots=True)
class ReleasesView:
    """What the console shows of the releases."""

    history: ReleasesReply | None
    """None if the server did not send it."""
    problem: str = ""
    """Why the server did not send the history, and what to do about it."""


class ServerReleases:
    """The releases of one server."""

    def __init__(
        self, url: str, key: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.url = url
        self._key = key
        self._clock = clock
        self._lock = threading.Lock()
        self._view: ReleasesView | None = None
        self._fetched_at = 0.0

    def view(self) -> ReleasesView:
        """Return the history of releases, or the reason why there is none."""
        with self._lock:
            if self._view is None or self._clock() - self._fetched_at > MAX_AGE_S:
                self._view = self._fetch()
                self._fetched_at = self._clock()
            return self._view

    def promote(self, version: int, target: DecisionTarget, *, force: bool) -> ReleaseRecord:
        """Release a version of the weights. Raises UserError if the server refuses."""
        with self._requests() as requests:
            record = requests.promote(version, force=force, target=target)
        self._forget_view()
        return record

    def roll_back(self, version: int, target: DecisionTarget) -> ReleaseRecord:
        """Let training go back to an earlier version of the weights. Raises UserError if the server
        refuses."""
        with self._requests() as requests:
            record = requests.roll_back(version, target=target)
        self._forget_view()
        return record

    def _requests(self) -> ReleaseRequests:
        return ReleaseRequests(self.url, self._key, MAX_WAIT_S)

    def _fetch(self) -> ReleasesView:
        try:
            with self._requests() as requests:
                return ReleasesView(requests.history())
        except UserError as error:  # translates: the page shows the sentence
            return ReleasesView(None, str(error))

    def _forget_view(self) -> None:
        with self._lock:
            self._view = None
