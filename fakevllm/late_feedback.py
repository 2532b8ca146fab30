"""Feedback that came after its group was sent: each becomes a sample of its own, the served answer
with an advantage that is centred by what the app says otherwise. The server takes each once."""

from __future__ import annotations

import asyncio
import logging

from fakevllm.feedback import BASELINE_OVER, TOO_SMALL, FeedbackSection, baseline_of
from fakevllm.ledger.feedback_rows import ServedCalls, sample_id
from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.store import Ledger
from fakevllm.settling import reason_of
from fakevllm.swarm.link import SwarmLink, is_passing, mend_of
from fakevllm_adapters.swarm import MAX_SAMPLE_CALLS, AddSampleRequest

log = logging.getLogger("fakevllm.feedback")

PAUSE_S = 1.0
"""After trouble."""


class LateFeedback:
    def __init__(self, settings: FeedbackSection, ledger: Ledger, link: SwarmLink) -> None:
        self._settings = settings
        self._ledger = ledger
        self._link = link
        self._woken = asyncio.Event()
        self._woken.set()  # earlier lives may have left something
        self._is_looking = False
        self._is_blocked = False
        """Whether something waits for its group to be settled."""

    def wake(self) -> None:
        """There is something to send."""
        self._woken.set()

    def group_settled(self) -> None:
        if self._is_blocked or self._is_looking:
            self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            await self._link.reached.wait()
            try:
                await self._send_all()
            except Exception as error:  # isolates: what waits is tried again
                log.warning("feedback waits: %s", mend_of(error))
                await asyncio.sleep(PAUSE_S)
                self._woken.set()

    async def _send_all(self) -> None:
        self._is_looking, self._is_blocked = True, False
        try:
            await self._ledger.flush()
            waiting = FeedbackState.WAITING
            for row in await asyncio.to_thread(self._ledger.feedback.in_state, waiting):
                await self._send(row)
        finally:
            self._is_looking = False

    async def _send(self, row: FeedbackRecord) -> None:
        """Raises what passes; any other trouble ends this feedback."""
        rows = self._ledger.feedback
        if await asyncio.to_thread(rows.is_unfinished, row.group_id):
            self._is_blocked = True
            return
        found = await asyncio.to_thread(rows.served_calls, row.group_id)
        reason = _why_not(found)
        if reason is not None:
            return rows.outcome(row, FeedbackState.KEPT, reason)
        others = await asyncio.to_thread(rows.others, row, BASELINE_OVER)
        baseline = baseline_of(others, self._settings.num_for_baseline)
        if baseline is None:
            return
        assert row.value is not None, "what waits counts for something"
        advantage = self._settings.weight * (row.value - baseline)
        if abs(advantage) < TOO_SMALL:
            return rows.outcome(
                row, FeedbackState.DROPPED, "same_as_all", baseline=baseline, amount=0.0
            )
        state, reason = await self._added(row, found, advantage)
        rows.outcome(row, state, reason, baseline=baseline, amount=advantage)

    async def _added(
        self, row: FeedbackRecord, found: ServedCalls, advantage: float
    ) -> tuple[FeedbackState, str | None]:
        try:
            reply = await self._link.add_sample(
                AddSampleRequest(
                    sample_id=sample_id(row),
                    run_id=found.run_id or "",
                    advantage=advantage,
                    calls=found.calls,
                )
            )
        except Exception as error:  # isolates: one odd feedback must not hold up the others
            if is_passing(error):
                raise
            log.warning("feedback about %s is lost: %s", row.group_id, mend_of(error))
            return FeedbackState.LOST, reason_of(error)
        if not reply.success:
            return FeedbackState.LOST, reply.failure_reason
        state = FeedbackState.POOLED if reply.pooled else FeedbackState.DROPPED
        return state, reply.failure_reason or None


def _why_not(found: ServedCalls) -> str | None:
    """Why an answer cannot be trained once more."""
    if not found.calls or len(found.calls) > MAX_SAMPLE_CALLS:
        return "no_calls: the answer was served once, and not sampled for training"
    reasons = [call.untrainable for call in found.calls]
    if all(reason is not None for reason in reasons):
        return f"no_trainable_call: {reasons[0]}"
    if not found.is_known:
        return "shaped: what its tokens were chosen from is known to the server's group alone"
    return None
