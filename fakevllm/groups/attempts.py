"""Which requests are one, sent again. Pure; time comes with the events.

By evidence only. Equal bodies are not enough: two users may ask the same, and one may want another
answer. A request is one sent again where its client says so, or where an equal one lost its
connection before its answer was through; each lost connection counts for one request.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_KEPT_BYTES = 64 * 2**20
"""Of answers, of all attempts together."""
MAX_ATTEMPTS = 10_000


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """A request, as far as it tells whether it came before."""

    key: bytes
    """Whose it is, and all that it asks: equal for equal requests."""
    is_marked: bool = False
    """Its client says that it sends it again."""
    idempotency_key: str = ""


@dataclass(slots=True, eq=False)
class RequestAttempts(Generic[T]):
    """A request with all the times it was sent."""

    sent: RequestIdentity
    pending: T
    """Whatever stands for its answer, there or to come."""
    at: float
    """When it was last heard of."""
    num_open: int = 1
    """Connections that wait for the answer."""
    num_cut: int = 0
    """Connections that were lost before it was through, and nobody sent again for."""
    num_told: int = 0
    """Connections that got all of it."""
    is_refused: bool = False
    """It ended without an answer: sent again, it is a new one."""
    size: int = 0
    """Of the answer in bytes."""

    def is_named_by(self, sent: RequestIdentity) -> bool:
        return bool(sent.idempotency_key) and sent.idempotency_key == self.sent.idempotency_key

    def is_another_than(self, sent: RequestIdentity) -> bool:
        """Both have names, and they differ."""
        own, other = self.sent.idempotency_key, sent.idempotency_key
        return bool(own and other) and own != other


class AttemptIndex(Generic[T]):
    """The latest requests, bounded in time, number and bytes of answers.

    >>> attempts = AttemptIndex[str](600)
    >>> first = attempts.begin(RequestIdentity(b"k"), "its answer", now=0)
    >>> attempts.find(RequestIdentity(b"k"), now=1) is None  # two users
    True
    >>> attempts.cut(first, now=2)
    >>> attempts.find(RequestIdentity(b"k"), now=3) is first
    True
    >>> attempts.find(RequestIdentity(b"k"), now=3) is first
    False
    """

    def __init__(
        self, window_s: float, max_bytes: int = MAX_KEPT_BYTES, max_attempts: int = MAX_ATTEMPTS
    ) -> None:
        self._window_s = window_s
        self._max_bytes = max_bytes
        self._max_attempts = max_attempts
        self._num_bytes = 0
        self._known: OrderedDict[RequestAttempts[T], None] = OrderedDict()
        """The one last heard of is last."""
        self._alike: dict[bytes, dict[RequestAttempts[T], None]] = {}
        self._cut: dict[bytes, dict[RequestAttempts[T], None]] = {}
        """Those of them that a connection was lost for: there are few, where many are alike."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def begin(self, sent: RequestIdentity, pending: T, now: float) -> RequestAttempts[T]:
        """A request that came for the first time."""
        attempt = RequestAttempts(sent, pending, now)
        self._known[attempt] = None
        self._alike.setdefault(sent.key, {})[attempt] = None
        self._bound(now)
        return attempt

    def find(self, sent: RequestIdentity, now: float) -> RequestAttempts[T] | None:
        """What this request was sent for before; it waits for that answer from now on. None: it is
        a new one."""
        self._bound(now)
        attempt = self._which(sent)
        if attempt is None:
            return None
        if attempt.is_refused:
            self._forget(attempt)
            return None
        self._cuts(attempt, -1)
        attempt.num_open += 1
        self._hear(attempt, now)
        return attempt

    def told(self, attempt: RequestAttempts[T], now: float) -> None:
        """The last byte of its answer is out to one who waited."""
        attempt.num_told += 1
        self.closed(attempt, now)

    def cut(self, attempt: RequestAttempts[T], now: float) -> None:
        """One who waited was lost before that."""
        self._cuts(attempt, 1)
        self.closed(attempt, now)

    def closed(self, attempt: RequestAttempts[T], now: float) -> None:
        """One who waited does so no more."""
        attempt.num_open -= 1
        self._hear(attempt, now)

    def lost(self, attempt: RequestAttempts[T], now: float) -> None:
        """One who was told has not got all of it."""
        attempt.num_told -= 1
        self._cuts(attempt, 1)
        self._hear(attempt, now)

    def found(self, attempt: RequestAttempts[T], now: float) -> None:
        """One who was thought to be lost had got all of it."""
        self._cuts(attempt, -1)
        attempt.num_told += 1
        self._hear(attempt, now)

    def refused(self, attempt: RequestAttempts[T], now: float) -> None:
        """It has come to its end without an answer."""
        attempt.is_refused = True
        self._hear(attempt, now)

    def keep(self, attempt: RequestAttempts[T], size: int) -> None:
        """Its answer is there."""
        if attempt in self._known:
            self._num_bytes += size - attempt.size
        attempt.size = size

    def _which(self, sent: RequestIdentity) -> RequestAttempts[T] | None:
        cut = self._cut.get(sent.key, ())
        if not sent.is_marked and not sent.idempotency_key:
            return next((one for one in cut if not one.is_refused), None)
        alike = self._alike.get(sent.key, ())
        possible = [one for one in alike if not one.is_another_than(sent)]
        named = [one for one in possible if one.is_named_by(sent)]
        if named:
            return named[-1]
        if lost := [one for one in cut if one in possible and not one.is_refused]:
            return lost[0]
        if not sent.is_marked:
            return None
        # One that was told an error is who asks again, rather than one who waits or was answered.
        refused = [one for one in possible if one.is_refused]
        waiting = [one for one in possible if one.num_open]
        told = [one for one in possible if one.num_told][-1:]
        return next(iter([*refused, *waiting, *told]), None)

    def _cuts(self, attempt: RequestAttempts[T], change: int) -> None:
        attempt.num_cut = max(0, attempt.num_cut + change)
        if attempt not in self._known:
            return
        if attempt.num_cut:
            self._cut.setdefault(attempt.sent.key, {})[attempt] = None
        else:
            _remove(self._cut, attempt)

    def _hear(self, attempt: RequestAttempts[T], now: float) -> None:
        attempt.at = now
        if attempt in self._known:
            self._known.move_to_end(attempt)

    def _bound(self, now: float) -> None:
        """Forgets what is too old or too much, but for those that somebody waits for."""
        num_bytes, num = self._num_bytes - self._max_bytes, len(self._known) - self._max_attempts
        forgotten: list[RequestAttempts[T]] = []
        for attempt in self._known:
            if now - attempt.at <= self._window_s and num_bytes <= 0 and num <= 0:
                break
            if not attempt.num_open:
                forgotten.append(attempt)
                num_bytes, num = num_bytes - attempt.size, num - 1
        for attempt in forgotten:
            self._forget(attempt)

    def _forget(self, attempt: RequestAttempts[T]) -> None:
        del self._known[attempt]
        self._num_bytes -= attempt.size
        _remove(self._alike, attempt)
        _remove(self._cut, attempt)


def _remove(
    index: dict[bytes, dict[RequestAttempts[T], None]], attempt: RequestAttempts[T]
) -> None:
    alike = index.get(attempt.sent.key, {})
    alike.pop(attempt, None)
    if not alike:
        index.pop(attempt.sent.key, None)
