"""Incremental text of an answer: token ids to text, and the cut at a stop string. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Turns token ids into text step by step, and holds back bytes that are not yet a whole
    character.

    Each step decodes only the ids after the text that is already returned, so a long answer costs
    linear time. A few earlier ids are decoded again as context, because some tokenizers decode a
    token differently at the start of a text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context_start = 0
        self._num_returned = 0

    def push(self, ids: Sequence[int], *, is_last: bool = False) -> str:
        """Return the text that `ids` add to the answer. With `is_last`, nothing is held back."""
        self._ids.extend(ids)
        before = self._decode(self._ids[self._context_start : self._num_returned])
        after = self._decode(self._ids[self._context_start :])
        if after.endswith("\ufffd") and not is_last:
            return ""
        self._context_start, self._num_returned = self._num_returned, len(self._ids)
        return after[len(before) :]


class StopScanner:
    """Cuts a text at the first stop string, and holds back an end of the text that may be the
    beginning of a stop string.

    >>> scanner = StopScanner(["END"])
    >>> scanner.push("abcE"), scanner.push("Nd"), scanner.flush()
    ('ab', 'cE', 'Nd')
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        """Scan for `stops`. With `includes_stop` the text ends with the stop string, otherwise
        before it."""
        self._stops = [stop for stop in stops if stop]
        self._includes_stop = includes_stop
        self._num_held = max((len(stop) for stop in self._stops), default=1) - 1
        self._pending = ""
        self.hit: str | None = None
        """The stop string that was found."""

    def push(self, text: str, *, is_armed: bool = True) -> str:
        """Return the text that cannot become part of a stop string any more. If `is_armed` is
        false, stop strings in `text` have no effect, and the whole text is returned."""
        self._pending += text
        if not is_armed:
            return self.flush()
        hits = [(at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if hits:
            at, self.hit = min(hits)
            end = at + len(self.hit) if self._includes_stop else at
            out, self._pending = self._pending[:end], ""
            return out
        num_certain = len(self._pending) - self._num_held
        if num_certain <= 0:
            return ""
        out, self._pending = self._pending[:num_certain], self._pending[num_certain:]
        return out

    def flush(self) -> str:
        """Return the text that is held back."""
        out, self._pending = self._pending, ""
        return out
