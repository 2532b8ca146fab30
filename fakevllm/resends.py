"""One request, one group: who sends a request again gets the answer it was to get at first, from
the group that still runs, or as it was kept. `dedupe.py` decides what is one request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from fakevllm.conversation.hints import Hints
from fakevllm.dedupe import Attempt, Attempts, Sent
from fakevllm.leaving import WhileThere
from fakevllm.ledger.kept_answers import KeptAnswers
from fakevllm.ledger.records import KeptAnswer
from fakevllm.reply import Answered, AppReply
from fakevllm_adapters.asgi import Receive, Scope
from fakevllm_adapters.bounded_http import ON_RESET
from fakevllm_adapters.errors import unavailable

log = logging.getLogger("fakevllm.requests")

_FAILED = unavailable("What this request was sent for before has failed. Try again.")


@dataclass(slots=True, eq=False)
class Pending:
    """The answer of one group."""

    group_id: str
    answer: asyncio.Future[Answered | None]
    """None: there is none, and who asks again is a new request."""
    has_left: bool = False
    """Who asked first."""
    num_resent: int = 0
    """How often it was told again."""


Attempted = Attempt[Pending]


def sent_of(
    path: str, scope: str, raw: bytes, hints: Hints, headers: Mapping[bytes, bytes]
) -> Sent:
    """`scope`: whose the request is; `raw`: its body as it came."""
    digest = blake2b(digest_size=16)
    for part in (path, scope, hints.session or "", hints.parent or "", hints.user):
        digest.update(part.encode(errors="replace") + b"\0")
    digest.update(raw)
    name = headers.get(b"idempotency-key", b"").decode("latin-1")
    return Sent(digest.digest(), hints.is_retry, name)


class Resends:
    def __init__(
        self, window_s: float, kept: KeptAnswers, now: Callable[[], float] = time.time
    ) -> None:
        """`now`: unix seconds, for what is kept is read by later lives."""
        self._attempts: Attempts[Pending] = Attempts(window_s)
        self._kept = kept
        self._window_s = window_s
        self._now = now

    def restore(self) -> None:
        """What an earlier life could not tell to its end."""
        for one in self._kept.all():
            if one.at + self._window_s < self._now():
                self._kept.forget(one.group_id)
                continue
            headers = [
                (name.encode("latin-1"), value.encode("latin-1")) for name, value in one.headers
            ]
            answered = Answered(one.status, headers, one.body)
            pending = Pending(one.group_id, _settled(answered))
            attempt = self._attempts.begin(Sent(one.key), pending, one.at)
            self._attempts.keep(attempt, len(one.body))
            self._attempts.cut(attempt, one.at)

    def find(self, sent: Sent, scope: Scope) -> Attempted | None:
        """What it was sent for before. `scope`: of its connection."""
        attempt = self._attempts.find(sent, self._now())
        if attempt is not None:
            self._watch(attempt, scope)
        return attempt

    def begin(self, sent: Sent, group_id: str, scope: Scope) -> Attempted:
        answer = asyncio.get_running_loop().create_future()
        attempt = self._attempts.begin(sent, Pending(group_id, answer), self._now())
        self._watch(attempt, scope)
        return attempt

    async def tell_again(self, attempt: Attempted, app: AppReply, receive: Receive) -> bool:
        """Waits for the answer, and gives it. False: there is none. Raises ClientLeft."""
        pending, end = attempt.answer, self._attempts.cut
        try:
            async with WhileThere(receive):
                answered = await asyncio.shield(pending.answer)
                if answered is None:
                    end = self._attempts.closed
                    if app.is_begun:
                        await app.refuse(_FAILED)
                    return app.is_begun
                await app.again(answered)
            if not app.was_cut:
                end = self._attempts.told
                pending.num_resent += 1
                self._kept.told(pending.group_id)
        finally:
            end(attempt, self._now())
        log.info("request %s was sent again and got its answer", pending.group_id)
        return True

    def left(self, attempt: Attempted | None) -> None:
        """The app that asked first, before its answer was out."""
        if attempt is not None and not attempt.answer.has_left:
            attempt.answer.has_left = True
            self._attempts.cut(attempt, self._now())

    def ended(self, attempt: Attempted | None, app: AppReply, *, is_answered: bool) -> None:
        """The app that asked first has what it gets."""
        if attempt is None:
            return
        pending, now = attempt.answer, self._now()
        answered = app.answered if is_answered else None
        if answered is None:
            self._attempts.refused(attempt, now)
        else:
            self._attempts.keep(attempt, len(answered.body))
        if not pending.has_left:
            (self._attempts.closed if answered is None else self._attempts.told)(attempt, now)
        elif not app.was_cut:
            self._attempts.found(attempt, now)
        if not pending.answer.done():
            pending.answer.set_result(answered)

    def _watch(self, attempt: Attempted, scope: Scope) -> None:
        """A connection may be lost behind the last byte, with some of it unread."""

        def lost() -> None:
            answer = attempt.answer.answer
            answered = answer.result() if answer.done() else None
            if not attempt.num_told or answered is None:
                return
            self._attempts.lost(attempt, self._now())
            if not attempt.num_told:
                self._kept.keep(_kept(attempt, answered, self._now()))

        state: object = scope.get("state")
        if isinstance(state, dict):
            state[ON_RESET] = lost


def missed(attempt: Attempted, app: AppReply, now: float) -> KeptAnswer | None:
    """The answer that the app was to get and has not, where nobody has got it since."""
    if not app.was_cut or attempt.num_told or app.answered is None:
        return None
    return _kept(attempt, app.answered, now)


def _kept(attempt: Attempted, answered: Answered, now: float) -> KeptAnswer:
    return KeptAnswer(
        attempt.answer.group_id,
        attempt.sent.key,
        now,
        answered.status,
        [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answered.headers],
        answered.body,
    )


def _settled(answered: Answered) -> asyncio.Future[Answered | None]:
    future: asyncio.Future[Answered | None] = asyncio.get_running_loop().create_future()
    future.set_result(answered)
    return future
