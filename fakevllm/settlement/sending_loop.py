"""The loop of a background task that sends feedback to the server.

Feedback about a group is sent only after the server's decision about the group is known. The loop
waits until the engine is ready, because the server refuses samples before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from fakevllm.errors import LedgerError
from fakevllm.ledger.records import FeedbackState
from fakevllm.release.arms import Arm
from fakevllm.swarm.errors import describe_error
from fakevllm_adapters.protocol.swarm import EndGroupReply

log = logging.getLogger("fakevllm.settlement.feedback_to_reward")

FIRST_PAUSE_S = 1.0
"""Seconds before the next attempt to send feedback after an error. The pause doubles with each
further error, until feedback was sent."""
MAX_PAUSE_S = 60.0
"""Maximum number of seconds between two attempts. New feedback ends a longer pause than the
first."""

TRAINED_ARMS = (None, Arm.TRAINING.value)
"""Arms (shares of the sessions, in the column `arm` of the ledger) whose answers are trained."""
Candidate = tuple[str, str, bool]
"""Group id and feedback id of feedback that waits, and whether its group is settled. A group is
settled if the server's decision about it is in the ledger."""


class SendingLoop:
    """Sends waiting feedback to the server as soon as possible. If one item of feedback could not
    be sent, all other items are tried before this item is tried again."""

    def __init__(
        self,
        subject: str,
        serving: asyncio.Event,
        find: Callable[[], Awaitable[list[Candidate]]],
        send: Callable[[str, str], Awaitable[None]],
    ) -> None:
        """Create the loop. `subject` names the feedback in the log. `serving` is set while the
        engine is ready. `find` returns the feedback that waits. `send` sends one item of feedback,
        and raises an error if a later attempt may succeed."""
        self._subject = subject
        self._serving = serving
        self._find = find
        self._send = send
        self._woken = asyncio.Event()
        self._woken.set()  # an earlier proxy process may have left feedback
        self._blocked: set[str] = set()
        """Groups for which the server's decision is not known yet. Feedback about such a group is
        sent only after this decision."""
        self._settled: set[str] | None = None
        """Groups whose outcome became known while the ledger was being read. None if the ledger is
        not being read at the moment."""
        self._num_failures: Counter[tuple[str, str]] = Counter()
        """Number of failed attempts for each feedback that waits."""
        self._pause_s = FIRST_PAUSE_S

    def wake(self) -> None:
        """Wake the loop, so that it looks for feedback to send."""
        self._woken.set()

    def group_settled(self, group_id: str) -> None:
        """Record that the server's decision about a group is known. If feedback about this group
        waited for the decision, wake the loop, which then sends the feedback."""
        if self._settled is not None:
            self._settled.add(group_id)
        if group_id in self._blocked:
            self._woken.set()

    async def run(self) -> None:
        """Send feedback to the server until cancelled."""
        while True:
            await self._woken.wait()
            await self._serving.wait()
            self._woken.clear()
            try:
                for key in await self._ready():
                    self._num_failures[key] += 1  # unless it is sent
                    await self._send(*key)
                    del self._num_failures[key]
                    self._pause_s = FIRST_PAUSE_S
            except Exception as error:  # isolates: waiting feedback is retried
                cause = (
                    str(error)
                    if isinstance(error, LedgerError)
                    else f"swarm server {describe_error(error)}"
                )
                log.warning("%s could not be sent and is retried: %s", self._subject, cause)
                await asyncio.sleep(FIRST_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s - FIRST_PAUSE_S):
                        await self._woken.wait()
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
                self._woken.set()

    async def _ready(self) -> list[tuple[str, str]]:
        """Return a pair (group id, feedback id) for each item of feedback that can be sent now.
        Items with the fewest failed attempts come first."""
        settled = self._settled = set[str]()
        try:
            candidates = await self._find()
        finally:
            self._settled = None
        self._blocked = {group_id for group_id, _, is_settled in candidates if not is_settled}
        if self._blocked & settled:
            self._woken.set()
        keys = [(group_id, name) for group_id, name, is_settled in candidates if is_settled]
        self._num_failures = Counter({key: self._num_failures[key] for key in keys})
        return sorted(keys, key=self._num_failures.__getitem__)


def outcome_of(reply: EndGroupReply) -> tuple[FeedbackState, str | None]:
    """Return the state of feedback that was sent to the server. Also return the reason if the
    server did not pool the feedback (keep it for a training step). `reply` is the server's
    reply."""
    if not reply.success:
        return FeedbackState.LOST, reply.failure_reason
    state = FeedbackState.POOLED if reply.pooled else FeedbackState.DROPPED
    return state, reply.failure_reason or None
