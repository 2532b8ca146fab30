"""Convert an answer's token ids to text piece by piece, and cut the text at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Converts the token ids of an answer to text, piece by piece. Bytes of an incomplete character
    are held back.

    Each step decodes only the ids whose text has not been returned yet, and a few earlier ids.
    Therefore the total time grows linearly with the length of the answer. The earlier ids are
    needed as context, because some tokenizers decode a token differently at the start of a text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context_start = 0
        self._num_returned = 0

    def push(self, ids: Sequence[int], *, is_last: bool = False) -> str:
        """Return the text that the ids add to the answer. Bytes of an incomplete character are held
        back until the next call, unless `is_last` is true."""
        self._ids.extend(ids)
        before = self._decode(self._ids[self._context_start : self._num_returned])
        after = self._decode(self._ids[self._context_start :])
        if after.endswith("\ufffd") and not is_last:
            return ""
        self._context_start, self._num_returned = self._num_returned, len(self._ids)
        return after[len(before) :]


class StopScanner:
    """Cuts a text at the first stop string. The text arrives piece by piece.

    If the longest stop string has n characters, the last n - 1 characters of the text are held
    back. They may be the beginning of a stop string.

    >>> scanner = StopScanner(["END"])
    >>> scanner.push("abcE"), scanner.push("Nd"), scanner.flush()
    ('ab', 'cE', 'Nd')
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        """Create a scanner for the stop strings `stops`. If `includes_stop` is true, the text is
        cut after the stop string, otherwise before it."""
        self._stops = [stop for stop in stops if stop]
        self._includes_stop = includes_stop
        self._num_held = max((len(stop) for stop in self._stops), default=1) - 1
        self._pending = ""
        self.hit: str | None = None
        """The stop string that was found, or None."""

    def push(self, text: str, *, is_armed: bool = True) -> str:
        """Add a piece of text. Return the text that certainly belongs to the answer and has not
        been returned yet. If `is_armed` is false, do not search for stop strings, and return all
        text."""
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
        """Return the text that is still held back because it could have begun a stop string. Call
        this method at the end of the answer."""
        out, self._pending = self._pending, ""
        return out
