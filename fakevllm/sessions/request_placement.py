"""Find the place of one request in the session tree: its session, its parent and its turn.

A request is placed only once, before the ledger record of its group is made. The record contains
the place. If an error occurs in this module, the app still gets its answer, and the request has no
place.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from fakevllm.sessions.client_session_ids import Hints
from fakevllm.sessions.conversation_matching import LookupResult
from fakevllm.sessions.tree import SessionTree
from fakevllm.sessions.types import IncomingRequest, Place

log = logging.getLogger("fakevllm.sessions")

Json = dict[str, Any]


@dataclass(slots=True)
class Placement:
    """One request of an app, and its place in the session tree: its session, its parent and its
    turn. The place is known after a call of `place`."""

    tree: SessionTree
    group_id: str
    scope: str
    """Fingerprint of the app's API key. Only sessions of the same key are found."""
    body: Json
    """The request body in the format of the upstream server."""
    prompt: str
    """The prompt, if the body has no messages."""
    hints: Hints
    received_at: float
    """Time of a monotonic clock in seconds."""
    size: int = 0
    """Size of the body in bytes."""
    _request: IncomingRequest | None = field(default=None, init=False)
    _lookup: LookupResult | None = field(default=None, init=False)
    _place: Place | None = field(default=None, init=False)
    _is_placed: bool = field(default=False, init=False)
    _is_served: bool = field(default=False, init=False)

    def session_id(self) -> str | None:
        """Return the id of the session that the request would continue as a main call (a request of
        the user or the agent). Return None if the request would open a new session.

        Calls that the app makes for itself, for example to get a title, are not main calls.

        Call `place` soon after this method, because `place` uses the session that this method has
        found. Between the two calls, other requests may evict this session from the tree.
        """
        try:
            self._lookup = self.tree.find(self._read(is_side=False))
        except Exception:  # isolates: trouble here never reaches the app
            log.exception("request %s could not be looked up", self.group_id)
            return None
        return self._lookup.session.id if self._lookup.session is not None else None

    def place(self, *, is_side: bool) -> Place | None:
        """Place the request in the session tree. Return its place: its session, its parent and its
        turn. Return None if the request could not be placed. Later calls return the same result.
        `is_side` is True if the app makes this call for itself, for example to get a title."""
        if not self._is_placed:
            self._is_placed = True
            try:
                # The lookup was that of a main call. A side call is found by quotes, too.
                lookup = None if is_side else self._lookup
                self._place = self.tree.place(self._read(is_side=is_side), lookup)
            except Exception:  # isolates: trouble here never reaches the app
                log.exception("request %s could not be placed", self.group_id)
        return self._place

    def root(self) -> str | None:
        """Return the id of the root session, from which the request's session was started directly
        or indirectly. A session that no other session has started is its own root. Return None if
        the request was not placed in a session. Call `place` first."""
        return None if self._place is None else self.tree.root_of(self._place.session_id)

    def served(self, message: Json, at: float, response_id: str | None) -> None:
        """Store the answer that the app gets. Later requests that continue the answer are then
        recognized. After a retry, this method may be called several times for one request. Only the
        first call has an effect.

        `at` is the time on the same monotonic clock as `received_at`.
        """
        if self._place is None or self._is_served:
            return
        self._is_served = True
        try:
            self.tree.served(self.group_id, message, at, response_id)
        except Exception:  # isolates: trouble here never reaches the app
            log.exception("the answer of request %s could not be kept", self.group_id)

    def failed(self, at: float) -> None:
        """Record that the app did not get a whole answer. If `served` was called before, this
        method does nothing."""
        if self._place is not None and not self._is_served:
            self.tree.failed(self.group_id, at)

    def _read(self, *, is_side: bool) -> IncomingRequest:
        if self._request is None:
            history, prompt_hash = self.tree.history_of(self.body, self.prompt, self.scope)
            self._request = IncomingRequest(
                group_id=self.group_id,
                scope=self.scope,
                history=history,
                received_at=self.received_at,
                size=self.size,
                hints=self.hints,
                is_side=is_side,
                prompt_hash=prompt_hash,
            )
        self._request.is_side = is_side
        return self._request
