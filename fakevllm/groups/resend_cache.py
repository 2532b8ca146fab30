"""A cache of answers, for requests that a client sends again (resends).

The first attempt is the request that the client sent first. A resend gets the answer to the first
attempt. If the first attempt is still being answered, the resend waits for this answer.
`resend_detection.py` decides which requests are resends.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from fakevllm.groups.resend_detection import AttemptIndex, RequestAttempts, RequestIdentity
from fakevllm.ledger.records import KeptAnswer
from fakevllm.ledger.undelivered_answers import KeptAnswers
from fakevllm.runtime.disconnect import CancelOnDisconnect
from fakevllm.sessions.client_session_ids import Hints
from fakevllm.transport.app_response import AppResponse, SentResponse
from fakevllm_adapters.http.asgi import ClientDisconnected, Receive, Scope
from fakevllm_adapters.protocol.errors import bad_request, unavailable
from fakevllm_runtime.http_protocol import ON_CONNECTION_LOST

log = logging.getLogger("fakevllm.requests")

RESET_WINDOW_S = 2.0
"""Length in seconds of the reset window, which begins when the last byte of an answer is sent. A
connection reset within the window means that the client did not read the whole answer. A later
reset means that the client had read the answer and just closed the connection."""
MIN_READ_RATE = 50_000
"""Bytes per second that even a slow client is assumed to read. The proxy writes an answer faster
than the client reads it. RESET_WINDOW_S is therefore extended by the time that reading the answer
takes at this rate."""

_REUSED_KEY = (
    "This `Idempotency-Key` was sent before with another body: send a new key with each new "
    "request, and the same body with each retry."
)
_FAILED = unavailable("What this request was sent for before has failed. Try again.")


@dataclass(slots=True, eq=False)
class PendingAnswer:
    """The answer to one request, with the state of its delivery. The answer may not exist yet."""

    group_id: str
    window_s: float
    """Seconds for which the answer may be delivered to a resend (a retry of the request)."""
    response: asyncio.Future[SentResponse | None]
    """Future of the answer. Its result is None if the request failed. A resend is then handled as a
    new request."""
    has_left: bool = False
    """Whether the app disconnected from the first attempt before it had the answer."""
    delivered_at: float = -math.inf
    """Time on the cache's clock at which the latest delivery of the answer was complete. -inf if
    the answer was not delivered yet, or was delivered as a stream."""
    num_resent: int = 0
    """Number of resends (retries of the request) that got the answer."""
    on_delivery: Callable[[], None] | None = None
    """Callback that is called just before the answer is delivered to a resend. Set only if the app
    disconnected from the first attempt before it had the answer."""


ResendEntry = RequestAttempts[PendingAnswer]


def identity_of(
    path: str, scope: str, raw: bytes, hints: Hints, headers: Mapping[bytes, bytes]
) -> RequestIdentity:
    """Return the parts of a request by which a resend (a retry by the client) is recognised.
    `scope` is the fingerprint of the app's API key, and `raw` is the request body as the app sent
    it."""
    digest = blake2b(digest_size=16)
    for part in (path, scope, hints.session or "", hints.parent or "", hints.user):
        digest.update(part.encode(errors="replace") + b"\0")
    digest.update(raw)
    key = digest.digest()
    idempotency_key = headers.get(b"idempotency-key", b"")
    if not idempotency_key:
        return RequestIdentity(key, hints.is_retry)
    # Hashed because a key may be long, and thousands of identities are kept.
    name = blake2b(scope.encode() + b"\0" + idempotency_key, digest_size=16).hexdigest()
    body = blake2b(raw, digest_size=16).digest()
    return RequestIdentity(key, hints.is_retry, name, body)


class ResendCache:
    """A cache of the answers to recent requests. A request that a client sends again (a resend) is
    answered from this cache."""

    def __init__(
        self,
        window_s: float,
        kept_answers: KeptAnswers,
        now: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """Create the cache. `window_s` is the number of seconds for which an answer may be
        delivered again; 0 turns the cache off. `now` is a monotonic clock in seconds, with which
        the cache measures the age of answers. `unix_time` is a clock in Unix seconds, for the times
        that the ledger stores. A later proxy process could not use times of a monotonic clock."""
        self._attempts: AttemptIndex[PendingAnswer] = AttemptIndex(window_s)
        self._kept_answers = kept_answers
        self._window_s = window_s
        self._now = now
        self._unix_time = unix_time

    @property
    def is_on(self) -> bool:
        """Whether this cache of answers is turned on. If it is off, every request is handled as a
        new one."""
        return self._window_s > 0

    def restore(self) -> None:
        """Load into this cache the answers that an earlier proxy process could not deliver. They
        are stored in the ledger (the proxy's SQLite file)."""
        if not self.is_on:
            return
        now, unix_now = self._now(), self._unix_time()
        for kept in self._kept_answers.unexpired(unix_now):
            headers = [(name.encode(), value.encode("latin-1")) for name, value in kept.headers]
            response = _completed_future(SentResponse(kept.status, headers, kept.body))
            pending = PendingAnswer(kept.group_id, self._window_s, response)
            # An answer cannot have more than the whole window left, unless the clock was set back.
            received_at = now - self._window_s + min(kept.until - unix_now, self._window_s)
            entry = self._attempts.begin(RequestIdentity(kept.key), pending, received_at)
            self._attempts.set_size(entry, len(kept.body))
            self._attempts.connection_lost(entry, received_at)

    def find(self, identity: RequestIdentity, scope: Scope) -> ResendEntry | None:
        """If this request is a resend of an earlier request, return the cache entry of the earlier
        request. Return None for a new request.

        `scope` is the ASGI scope of this request's connection.
        """
        entry = self._attempts.find(identity, self._now())
        if entry is not None:
            _watch(scope, partial(self._connection_reset, entry))
        return entry

    def check_idempotency_key(self, identity: RequestIdentity) -> None:
        """Raise WireError (400) if an earlier request had the same idempotency key and a different
        body."""
        if self._attempts.reuses_idempotency_key(identity, self._now()):
            raise bad_request(_REUSED_KEY)

    def begin(self, identity: RequestIdentity, group_id: str, scope: Scope) -> ResendEntry:
        """Add a new request to the cache, and return its entry. The caller must call `ended` when
        the request has ended."""
        response: asyncio.Future[SentResponse | None] = asyncio.get_running_loop().create_future()
        pending = PendingAnswer(group_id, self._window_s, response)
        entry = self._attempts.begin(identity, pending, self._now())
        _watch(scope, partial(self._first_connection_reset, entry))
        return entry

    async def deliver(self, entry: ResendEntry, app: AppResponse, receive: Receive) -> bool:
        """Wait until the first attempt (the request as it was sent first) is answered. Send this
        answer to the app that has sent the request again.

        Return False if the first attempt failed and nothing was sent to the app. The caller can
        then handle the request as a new one.

        Return True if a response was sent to the app. This response is usually the answer. If the
        first attempt failed after the response to the app had started, an error was sent instead.

        Raises ClientDisconnected if the app disconnects while this method waits.
        """
        pending = entry.pending
        try:
            async with CancelOnDisconnect(receive):
                response = await asyncio.shield(pending.response)
                if response is not None:
                    if pending.on_delivery is not None:
                        pending.on_delivery()
                    await app.send_stored(response)
                elif app.is_started:
                    await app.refuse(_FAILED)
        except (ClientDisconnected, asyncio.CancelledError):
            self._attempts.connection_lost(entry, self._now())
            raise
        if response is None:
            self._attempts.stopped_waiting(entry, self._now())
            return app.is_started
        if app.is_cut_short:
            self._attempts.connection_lost(entry, self._now())
            return True
        self._delivered(entry, app)
        pending.num_resent += 1
        self._kept_answers.delivered(pending.group_id)
        log.info(
            "request %s was sent again and got its answer",
            pending.group_id,
            extra={"group": pending.group_id},
        )
        return True

    def client_disconnected(self, entry: ResendEntry | None) -> None:
        """Record that the app disconnected from the first attempt (the request as it was sent
        first) before the app had the answer."""
        if entry is not None and not entry.pending.has_left:
            entry.pending.has_left = True
            self._attempts.connection_lost(entry, self._now())

    def ended(self, entry: ResendEntry | None, app: AppResponse, *, is_answered: bool) -> None:
        """Record that the first attempt (the request as it was sent first) has ended. `is_answered`
        is True if the attempt ended with a model's answer, and False if it ended with an error."""
        if entry is None:
            return
        pending, now = entry.pending, self._now()
        response = app.complete_answer if is_answered else None
        if response is None:
            self._attempts.failed(entry, now)
        else:
            self._attempts.set_size(entry, len(response.body))
        if not pending.has_left:
            if response is None:
                self._attempts.stopped_waiting(entry, now)
            else:
                self._delivered(entry, app)
        elif not app.is_cut_short:
            self._attempts.delivery_confirmed(entry, now)
        if not pending.response.done():
            pending.response.set_result(response)

    def forget(self, *group_ids: str) -> None:
        """Remove the answers to the requests with these group ids, because the requests were
        deleted. If such a request is sent again, it is handled as a new request."""
        deleted = frozenset(group_ids)
        for pending in self._attempts.remove_matching(lambda one: one.group_id in deleted):
            # After this, a connection reset of the first attempt cannot store the answer again.
            pending.response = _completed_future(None)

    def _delivered(self, entry: ResendEntry, app: AppResponse) -> None:
        entry.pending.delivered_at = self._now() if app.is_single_chunk else -math.inf
        self._attempts.delivered(entry, self._now())

    def _first_connection_reset(self, entry: ResendEntry, error: Exception | None) -> None:
        if entry.pending.response.done():
            self._connection_reset(entry, error)
        else:  # the request's own task may not have seen the disconnect yet
            self.client_disconnected(entry)

    def _connection_reset(self, entry: ResendEntry, error: Exception | None) -> None:
        """Handle the loss of a connection on which an answer was sent. A client that closes its
        socket before it has read the whole answer causes a connection reset. A client that has read
        everything closes the connection normally. Therefore, if the connection was reset soon after
        the last byte was sent, record that the answer was not delivered.

        Streamed answers are not checked, because a client may stop reading a stream on purpose.
        """
        now, pending = self._now(), entry.pending
        response = pending.response.result() if pending.response.done() else None
        if response is None or not isinstance(error, OSError) or not entry.num_delivered:
            return
        if now - pending.delivered_at > RESET_WINDOW_S + len(response.body) / MIN_READ_RATE:
            return
        self._attempts.delivery_failed(entry, now)
        if not entry.num_delivered:
            self._kept_answers.keep(_kept_answer(entry, response, self._unix_time()))


def undelivered_answer(entry: ResendEntry, app: AppResponse, unix_now: float) -> KeptAnswer | None:
    """Return the complete answer to a request if it was delivered neither to the first attempt nor
    to a resend. Return None if the answer was delivered, or if there is no complete answer.
    `unix_now` is the current time in Unix seconds."""
    if not app.is_cut_short or entry.num_delivered or app.complete_answer is None:
        return None
    return _kept_answer(entry, app.complete_answer, unix_now)


def _kept_answer(entry: ResendEntry, response: SentResponse, unix_now: float) -> KeptAnswer:
    pending = entry.pending
    return KeptAnswer(
        pending.group_id,
        entry.identity.key,
        unix_now + pending.window_s,
        response.status,
        [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers],
        response.body,
    )


def _watch(scope: Scope, on_lost: Callable[[Exception | None], None]) -> None:
    """Register the callback `on_lost` for the connection of the ASGI scope `scope`. Uvicorn's HTTP
    protocol object calls the callback when this connection is lost."""
    state: object = scope.get("state")
    if isinstance(state, dict):
        state[ON_CONNECTION_LOST] = on_lost


def _completed_future(response: SentResponse | None) -> asyncio.Future[SentResponse | None]:
    future: asyncio.Future[SentResponse | None] = asyncio.get_running_loop().create_future()
    future.set_result(response)
    return future
