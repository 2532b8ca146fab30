"""One request on its way through the tree: placed once, at the latest when its group is recorded.

Trouble here never reaches the app: what cannot be placed has no place.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from fakevllm.sessions.hints import Hints
from fakevllm.sessions.lookup import Found
from fakevllm.sessions.tree import Conversations
from fakevllm.sessions.types import Asked, Place

log = logging.getLogger("fakevllm.sessions")

Json = dict[str, Any]


@dataclass(slots=True)
class Visit:
    conversations: Conversations
    group_id: str
    scope: str
    """Whose sessions it may continue: the key's fingerprint."""
    body: Json
    """In the upstream's format."""
    prompt: str
    """Of a body without messages."""
    hints: Hints
    received_at: float
    size: int = 0
    """Of the body in bytes."""
    _asked: Asked | None = field(default=None, init=False)
    _found: Found | None = field(default=None, init=False)
    _place: Place | None = field(default=None, init=False)
    _is_placed: bool = field(default=False, init=False)
    _is_served: bool = field(default=False, init=False)

    def session_id(self) -> str | None:
        """The session it continues as a main call, None where none is known yet. It is to be
        placed next: what was found is not looked up twice, and others may push it out."""
        try:
            self._found = self.conversations.find(self._read(is_side=False))
        except Exception:  # isolates: see above
            log.exception("request %s could not be looked up", self.group_id)
            return None
        return self._found.session.id if self._found.session is not None else None

    def place(self, *, is_side: bool) -> Place | None:
        """The first call counts."""
        if not self._is_placed:
            self._is_placed = True
            try:
                found = None if is_side else self._found  # a side call is also known by quotes
                self._place = self.conversations.place(self._read(is_side=is_side), found)
            except Exception:  # isolates: see above
                log.exception("request %s could not be placed", self.group_id)
        return self._place

    def served(self, message: Json, at: float, response_id: str | None) -> None:
        """What the app gets, be it late; the first call counts."""
        if self._place is None or self._is_served:
            return
        self._is_served = True
        try:
            self.conversations.served(self.group_id, message, at, response_id)
        except Exception:  # isolates: see above
            log.exception("the answer of request %s could not be kept", self.group_id)

    def failed(self, at: float) -> None:
        """The app got nothing, or not all of it, so far."""
        if self._place is not None and not self._is_served:
            self.conversations.failed(self.group_id, at)

    def _read(self, *, is_side: bool) -> Asked:
        if self._asked is None:
            history, text = self.conversations.history_of(self.body, self.prompt, self.scope)
            self._asked = Asked(
                group_id=self.group_id,
                scope=self.scope,
                history=history,
                received_at=self.received_at,
                size=self.size,
                hints=self.hints,
                is_side=is_side,
                text=text,
            )
        self._asked.is_side = is_side
        return self._asked
