"""Detection of resends: requests that a client sends again. This module does no I/O, and the caller
passes the time.

Equal bodies do not prove that a request is a resend. Two users may ask the same question, or one
user may want another answer.

A request counts as a resend in two cases:

* The client marks the request as a retry, by a retry header or an idempotency key.
* An equal earlier request lost its connection before its answer was delivered. For each lost
  connection, at most one later request counts as a resend.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bytes, str)
T = TypeVar("T")

MAX_ANSWER_BYTES = 64 * 2**20
"""Maximum total size in bytes of the answers to all requests in the index."""
MAX_REQUESTS = 10_000


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The parts of a request by which a resend (a request that is sent again) is recognised."""

    key: bytes
    """Hash of the request's path, API key, session and body. Equal requests have the same hash."""
    is_marked: bool = False
    """Whether the client marks the request as a retry."""
    idempotency_key: str = ""
    """Hash of the API key and the client's idempotency key; "" if the client sent no idempotency
    key."""
    body: bytes = b""
    """Hash of the body alone."""


@dataclass(slots=True, eq=False)
class RequestAttempts(Generic[T]):
    """One request with all attempts of its client to send it: the first attempt, and the
    resends."""

    identity: RequestIdentity
    pending: T
    """The caller's object for the answer to this request. The answer itself may not exist yet."""
    last_event_at: float
    """Time at which this object was last changed, on the caller's clock."""
    num_waiting: int = 1
    """Number of connections that wait for the answer."""
    num_lost: int = 0
    """Number of connections that were lost before the answer was delivered, and for which no resend
    has arrived yet."""
    num_delivered: int = 0
    """Number of connections that got the whole answer."""
    has_failed: bool = False
    """Whether the request ended without an answer. A resend is then handled as a new request."""
    size: int = 0
    """Size of the answer in bytes."""

    def has_idempotency_key_of(self, identity: RequestIdentity) -> bool:
        key = identity.idempotency_key
        return bool(key) and key == self.identity.idempotency_key

    def conflicts_with(self, identity: RequestIdentity) -> bool:
        """Return True if this request and `identity` both have idempotency keys, and the two keys
        differ."""
        own, other = self.identity.idempotency_key, identity.idempotency_key
        return bool(own and other) and own != other


class AttemptIndex(Generic[T]):
    """An index of the latest requests. It recognises resends (requests that are sent again). It
    limits the age of a request, the number of requests, and the total size of their answers.

    >>> index = AttemptIndex[str](600)
    >>> first = index.begin(RequestIdentity(b"k"), "its answer", now=0)
    >>> index.find(RequestIdentity(b"k"), now=1) is None  # two users with equal requests
    True
    >>> index.connection_lost(first, now=2)
    >>> index.find(RequestIdentity(b"k"), now=3) is first
    True
    >>> index.find(RequestIdentity(b"k"), now=3) is first
    False
    """

    def __init__(
        self, window_s: float, max_bytes: int = MAX_ANSWER_BYTES, max_requests: int = MAX_REQUESTS
    ) -> None:
        """Create an index that forgets a request `window_s` seconds after the last event of the
        request. Events are attempts to send the request, deliveries of the answer, and lost
        connections."""
        self._window_s = window_s
        self._max_bytes = max_bytes
        self._max_requests = max_requests
        self._num_bytes = 0
        self._requests: OrderedDict[RequestAttempts[T], None] = OrderedDict()
        """All requests, in the order of their last events."""
        self._by_key: dict[bytes, dict[RequestAttempts[T], None]] = {}
        self._lost_by_key: dict[bytes, dict[RequestAttempts[T], None]] = {}
        """The requests with a lost connection, by the key of their identity. Few requests have a
        lost connection, even if many requests are equal."""
        self._by_idempotency_key: dict[str, dict[RequestAttempts[T], None]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of the answers to all requests in the index."""
        return self._num_bytes

    def begin(self, identity: RequestIdentity, pending: T, now: float) -> RequestAttempts[T]:
        """Remember a request that arrives for the first time, so that a resend is recognised."""
        attempts = RequestAttempts(identity, pending, now)
        self._requests[attempts] = None
        self._by_key.setdefault(identity.key, {})[attempts] = None
        if identity.idempotency_key:
            same_key = self._by_idempotency_key.setdefault(identity.idempotency_key, {})
            same_key[attempts] = None
        self._evict(now)
        return attempts

    def reuses_idempotency_key(self, identity: RequestIdentity, now: float) -> bool:
        """Return True if an earlier request had the same idempotency key and a different body.
        Earlier requests that ended without an answer do not count.

        >>> index = AttemptIndex[str](600)
        >>> _ = index.begin(RequestIdentity(b"1", idempotency_key="k", body=b"1"), "", now=0)
        >>> other = RequestIdentity(b"2", idempotency_key="k", body=b"2")
        >>> index.reuses_idempotency_key(other, now=1)
        True
        """
        self._evict(now)
        same_key = self._by_idempotency_key.get(identity.idempotency_key, ())
        return any(a.identity.body != identity.body and not a.has_failed for a in same_key)

    def find(self, identity: RequestIdentity, now: float) -> RequestAttempts[T] | None:
        """If this request is a resend of an earlier request, return the earlier request. Return
        None for a new request.

        The resend is counted as one more connection that waits for the earlier request's answer.
        """
        self._evict(now)
        attempts = self._match(identity)
        if attempts is None:
            return None
        if attempts.has_failed:
            self._remove(attempts)
            return None
        self._add_lost(attempts, -1)
        attempts.num_waiting += 1
        self._touch(attempts, now)
        return attempts

    def delivered(self, attempts: RequestAttempts[T], now: float) -> None:
        """Record that a waiting connection has got the request's whole answer."""
        attempts.num_delivered += 1
        self.stopped_waiting(attempts, now)

    def connection_lost(self, attempts: RequestAttempts[T], now: float) -> None:
        """Record that a connection of this request was lost before the request's answer was
        delivered on it."""
        self._add_lost(attempts, 1)
        self.stopped_waiting(attempts, now)

    def stopped_waiting(self, attempts: RequestAttempts[T], now: float) -> None:
        """Record that a connection which waited for the request's answer has stopped waiting."""
        attempts.num_waiting -= 1
        self._touch(attempts, now)

    def delivery_failed(self, attempts: RequestAttempts[T], now: float) -> None:
        """Undo an earlier call of `delivered`. Call this method if a connection that was recorded
        as delivered did not get the whole answer."""
        attempts.num_delivered -= 1
        self._add_lost(attempts, 1)
        self._touch(attempts, now)

    def delivery_confirmed(self, attempts: RequestAttempts[T], now: float) -> None:
        """Undo an earlier call of `connection_lost`. Call this method if a connection that was
        recorded as lost did get the whole answer."""
        self._add_lost(attempts, -1)
        attempts.num_delivered += 1
        self._touch(attempts, now)

    def failed(self, attempts: RequestAttempts[T], now: float) -> None:
        """Record that the request ended without an answer."""
        attempts.has_failed = True
        self._touch(attempts, now)

    def remove_matching(self, matches: Callable[[T], bool]) -> list[T]:
        """Remove all requests for which `matches(request.pending)` is True. `pending` is the
        caller's object for the answer to the request. Return these objects for the removed
        requests."""
        removed = [attempts for attempts in self._requests if matches(attempts.pending)]
        for attempts in removed:
            self._remove(attempts)
        return [attempts.pending for attempts in removed]

    def set_size(self, attempts: RequestAttempts[T], size: int) -> None:
        """Record the size in bytes of the request's answer. The size counts towards the index's
        size limit."""
        if attempts in self._requests:
            self._num_bytes += size - attempts.size
        attempts.size = size

    def _match(self, identity: RequestIdentity) -> RequestAttempts[T] | None:
        lost = [a for a in self._lost_by_key.get(identity.key, ()) if not a.has_failed]
        if not identity.is_marked and not identity.idempotency_key:
            return lost[0] if lost else None
        equal = self._by_key.get(identity.key, ())
        candidates = [a for a in equal if not a.conflicts_with(identity)]
        same_key = [a for a in candidates if a.has_idempotency_key_of(identity)]
        if same_key:
            return same_key[-1]
        if lost_candidates := [a for a in lost if a in candidates]:
            return lost_candidates[0]
        if not identity.is_marked:
            return None
        # A client that got an error is more likely to retry than one that waits or was answered.
        failed = [a for a in candidates if a.has_failed]
        waiting = [a for a in candidates if a.num_waiting]
        delivered = [a for a in candidates if a.num_delivered][-1:]
        return next(iter([*failed, *waiting, *delivered]), None)

    def _add_lost(self, attempts: RequestAttempts[T], change: int) -> None:
        attempts.num_lost = max(0, attempts.num_lost + change)
        if attempts not in self._requests:
            return
        if attempts.num_lost:
            self._lost_by_key.setdefault(attempts.identity.key, {})[attempts] = None
        else:
            _discard(self._lost_by_key, attempts.identity.key, attempts)

    def _touch(self, attempts: RequestAttempts[T], now: float) -> None:
        attempts.last_event_at = now
        if attempts in self._requests:
            self._requests.move_to_end(attempts)

    def _evict(self, now: float) -> None:
        """Remove requests that are too old. If there are too many requests, or if their answers are
        too large, also remove the oldest requests. A request is kept while a connection waits for
        its answer."""
        excess_bytes = self._num_bytes - self._max_bytes
        excess = len(self._requests) - self._max_requests
        evicted: list[RequestAttempts[T]] = []
        for attempts in self._requests:
            is_fresh = now - attempts.last_event_at <= self._window_s
            if is_fresh and excess_bytes <= 0 and excess <= 0:
                break
            if not attempts.num_waiting:
                evicted.append(attempts)
                excess_bytes, excess = excess_bytes - attempts.size, excess - 1
        for attempts in evicted:
            self._remove(attempts)

    def _remove(self, attempts: RequestAttempts[T]) -> None:
        del self._requests[attempts]
        self._num_bytes -= attempts.size
        _discard(self._by_key, attempts.identity.key, attempts)
        _discard(self._lost_by_key, attempts.identity.key, attempts)
        _discard(self._by_idempotency_key, attempts.identity.idempotency_key, attempts)


def _discard(
    index: dict[K, dict[RequestAttempts[T], None]], key: K, attempts: RequestAttempts[T]
) -> None:
    equal = index.get(key, {})
    equal.pop(attempts, None)
    if not equal:
        index.pop(key, None)
