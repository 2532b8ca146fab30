"""How often a client says of its waits, and of what all its episodes are told. Pure."""

from __future__ import annotations

import re

from fakevllm.seldom import Seldom

SHORT_S = 5.0
"""Shorter waits are not worth a line: a step of a small model is over by then, and every episode
that is due waits for it."""
TELL_EVERY_S = 30.0
"""Between lines about the same wait."""
_NUMBER = re.compile(r"\d+")


class Waits:
    """Of all talks of a client, in any thread: hundreds wait for the same thing, and it is told
    once, then now and again."""

    def __init__(self) -> None:
        self._seldom = Seldom(TELL_EVERY_S)

    def is_due(self, why: str, waited_s: float, now: float) -> bool:
        """Whether to tell it now, by a talk that has waited so long in all."""
        if waited_s < SHORT_S:
            return False
        words = _NUMBER.sub("N", why)  # which move meanwhile
        return self._seldom.due(words, now) is not None
