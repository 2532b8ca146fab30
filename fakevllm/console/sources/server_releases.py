"""The releases of the swarm server: their history, and the decisions of an operator.

All browser pages share one cached history. The methods block the calling thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fakevllm.console.sources.shared_reply import SharedReply
from fakevllm.errors import UserError
from fakevllm.sdk.release_requests import DecisionTarget, ReleaseRequests
from fakevllm_adapters.protocol.releases import ReleaseRecord, ReleasesReply

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
        self._reply = SharedReply(self._fetch, clock)

    def view(self) -> ReleasesView:
        """Return the history of releases, or the reason why there is none."""
        view = self._reply.get(MAX_WAIT_S)
        return view or ReleasesView(None, f"The server at {self.url} has not answered yet.")

    def promote(self, version: int, target: DecisionTarget, *, force: bool) -> ReleaseRecord:
        """Release a version of the weights. Raises UserError if the server refuses."""
        with self._requests() as requests:
            record = requests.promote(version, force=force, target=target)
        self._reply.forget()
        return record

    def roll_back(self, version: int, target: DecisionTarget) -> ReleaseRecord:
        """Let training go back to an earlier version of the weights. Raises UserError if the server
        refuses."""
        with self._requests() as requests:
            record = requests.roll_back(version, target=target)
        self._reply.forget()
        return record

    def hold(self, target: DecisionTarget) -> ReleaseRecord:
        """Let the server release no version until `resume` is called. Raises UserError if the
        server refuses."""
        with self._requests() as requests:
            record = requests.hold(target=target)
        self._reply.forget()
        return record

    def resume(self, target: DecisionTarget) -> ReleaseRecord:
        """Let the server release versions again. Raises UserError if the server refuses."""
        with self._requests() as requests:
            record = requests.resume(target=target)
        self._reply.forget()
        return record

    def _requests(self) -> ReleaseRequests:
        return ReleaseRequests(self.url, self._key, MAX_WAIT_S)

    def _fetch(self) -> ReleasesView:
        try:
            with self._requests() as requests:
                return ReleasesView(requests.history())
        except UserError as error:  # translates: the page shows the sentence
            return ReleasesView(None, str(error))
