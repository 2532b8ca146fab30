"""One request, one group: who sends a request again gets the answer it was to get at first, from
the group that still runs, or as it was kept. `dedupe.py` decides what is one request."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from fakevllm.groups.attempts import AttemptIndex, RequestAttempts, RequestIdentity
from fakevllm.ledger.kept_answers import KeptAnswers
from fakevllm.ledger.records import KeptAnswer
from fakevllm.runtime.disconnect import CancelOnDisconnect
from fakevllm.sessions.hints import Hints
from fakevllm.transport.app_response import Answered, AppReply
from fakevllm_adapters.http.asgi import ClientDisconnected, Receive, Scope
from fakevllm_adapters.http.head_limit import ON_CONNECTION_LOST
from fakevllm_adapters.protocol.errors import unavailable

log = logging.getLogger("fakevllm.requests")

LOSS_S = 2.0
"""Behind the last byte: a connection that is reset later is one nobody had use for."""
SLOWEST = 50_000
"""Bytes a second at which an answer is still being read behind that: it left here at once."""

_FAILED = unavailable("What this request was sent for before has failed. Try again.")


@dataclass(slots=True, eq=False)
class PendingAnswer:
    """The answer of one group."""

    group_id: str
    window_s: float
    """How long it may be told again."""
    answered: asyncio.Future[Answered | None]
    """None: there is none, and who asks again is a new request."""
    has_left: bool = False
    """Who asked first."""
    told_at: float = -math.inf
    """When it last went out, in one piece."""
    num_resent: int = 0
    """How often it was told again."""
    on_told: Callable[[], None] | None = None
    """Called before it is told to somebody, where nobody was there at first."""


ResendEntry = RequestAttempts[PendingAnswer]


def sent_of(
    path: str, scope: str, raw: bytes, hints: Hints, headers: Mapping[bytes, bytes]
) -> RequestIdentity:
    """`scope`: whose the request is; `raw`: its body as it came."""
    digest = blake2b(digest_size=16)
    for part in (path, scope, hints.session or "", hints.parent or "", hints.user):
        digest.update(part.encode(errors="replace") + b"\0")
    digest.update(raw)
    name = headers.get(b"idempotency-key", b"").decode("latin-1")
    return RequestIdentity(digest.digest(), hints.is_retry, name)


class ResendCache:
    def __init__(
        self, window_s: float, kept: KeptAnswers, now: Callable[[], float] = time.time
    ) -> None:
        """`window_s`: how long an answer may be told again, 0 for never. `now`: unix seconds, for
        what is kept is read by later lives."""
        self._attempts: AttemptIndex[PendingAnswer] = AttemptIndex(window_s)
        self._kept = kept
        self._window_s = window_s
        self._now = now

    @property
    def is_on(self) -> bool:
        """Else no request is to be looked at for having been sent before."""
        return self._window_s > 0

    def restore(self) -> None:
        """What an earlier life could not tell to its end."""
        if not self.is_on:
            return
        for one in self._kept.unexpired(self._now()):
            headers = [(name.encode(), told.encode("latin-1")) for name, told in one.headers]
            answered = _settled(Answered(one.status, headers, one.body))
            pending = PendingAnswer(one.group_id, self._window_s, answered)
            came_at = one.until - self._window_s
            attempt = self._attempts.begin(RequestIdentity(one.key), pending, came_at)
            self._attempts.keep(attempt, len(one.body))
            self._attempts.cut(attempt, came_at)

    def find(self, sent: RequestIdentity, scope: Scope) -> ResendEntry | None:
        """What it was sent for before. `scope`: of its connection."""
        attempt = self._attempts.find(sent, self._now())
        if attempt is not None:
            _watch(scope, partial(self._lost, attempt))
        return attempt

    def begin(self, sent: RequestIdentity, group_id: str, scope: Scope) -> ResendEntry:
        """Whoever begins it also tells that it has `ended`."""
        pending = PendingAnswer(
            group_id, self._window_s, asyncio.get_running_loop().create_future()
        )
        attempt = self._attempts.begin(sent, pending, self._now())
        _watch(scope, partial(self._first_lost, attempt))
        return attempt

    async def tell_again(self, attempt: ResendEntry, app: AppReply, receive: Receive) -> bool:
        """Waits for the answer, and gives it. False: there is none. Raises ClientDisconnected."""
        pending = attempt.pending
        try:
            async with CancelOnDisconnect(receive):
                answered = await asyncio.shield(pending.answered)
                if answered is not None:
                    if pending.on_told is not None:
                        pending.on_told()
                    await app.again(answered)
                elif app.is_begun:
                    await app.refuse(_FAILED)
        except (ClientDisconnected, asyncio.CancelledError):
            self._attempts.cut(attempt, self._now())
            raise
        if answered is None:
            self._attempts.closed(attempt, self._now())
            return app.is_begun
        if app.was_cut:
            self._attempts.cut(attempt, self._now())
            return True
        self._told(attempt, app)
        pending.num_resent += 1
        self._kept.delivered(pending.group_id)
        log.info(
            "request %s was sent again and got its answer",
            pending.group_id,
            extra={"group": pending.group_id},
        )
        return True

    def left(self, attempt: ResendEntry | None) -> None:
        """The app that asked first, before its answer was out."""
        if attempt is not None and not attempt.pending.has_left:
            attempt.pending.has_left = True
            self._attempts.cut(attempt, self._now())

    def ended(self, attempt: ResendEntry | None, app: AppReply, *, is_answered: bool) -> None:
        """The app that asked first has what it gets."""
        if attempt is None:
            return
        pending, now = attempt.pending, self._now()
        answered = app.answered if is_answered else None
        if answered is None:
            self._attempts.refused(attempt, now)
        else:
            self._attempts.keep(attempt, len(answered.body))
        if not pending.has_left:
            if answered is None:
                self._attempts.closed(attempt, now)
            else:
                self._told(attempt, app)
        elif not app.was_cut:
            self._attempts.found(attempt, now)
        if not pending.answered.done():
            pending.answered.set_result(answered)

    def _told(self, attempt: ResendEntry, app: AppReply) -> None:
        attempt.pending.told_at = self._now() if app.is_in_one_piece else -math.inf
        self._attempts.told(attempt, self._now())

    def _first_lost(self, attempt: ResendEntry, error: Exception | None) -> None:
        if attempt.pending.answered.done():
            self._lost(attempt, error)
        else:  # its request may not have heard of it yet
            self.left(attempt)

    def _lost(self, attempt: ResendEntry, error: Exception | None) -> None:
        """A client that closes with something unread resets its connection. One that has read all
        does not, but for those that stop in the middle of a stream because they know enough."""
        now, pending = self._now(), attempt.pending
        answered = pending.answered.result() if pending.answered.done() else None
        if answered is None or not isinstance(error, OSError) or not attempt.num_told:
            return
        if now - pending.told_at > LOSS_S + len(answered.body) / SLOWEST:
            return
        self._attempts.lost(attempt, now)
        if not attempt.num_told:
            self._kept.keep(_kept(attempt, answered, now))


def missed(attempt: ResendEntry, app: AppReply, now: float) -> KeptAnswer | None:
    """The answer that the app was to get and has not, where nobody has got it since."""
    if not app.was_cut or attempt.num_told or app.answered is None:
        return None
    return _kept(attempt, app.answered, now)


def _kept(attempt: ResendEntry, answered: Answered, now: float) -> KeptAnswer:
    pending = attempt.pending
    return KeptAnswer(
        pending.group_id,
        attempt.sent.key,
        now + pending.window_s,
        answered.status,
        [(name.decode("latin-1"), told.decode("latin-1")) for name, told in answered.headers],
        answered.body,
    )


def _watch(scope: Scope, on_lost: Callable[[Exception | None], None]) -> None:
    state: object = scope.get("state")
    if isinstance(state, dict):
        state[ON_CONNECTION_LOST] = on_lost


def _settled(answered: Answered) -> asyncio.Future[Answered | None]:
    future: asyncio.Future[Answered | None] = asyncio.get_running_loop().create_future()
    future.set_result(answered)
    return future
