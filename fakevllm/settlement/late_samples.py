"""Feedback that came after its group was sent: each becomes a sample of its own, the served answer
with an advantage that is centred by what the app says otherwise. The server takes each once."""

from __future__ import annotations

import asyncio
import logging

from fakevllm.config.reward import BASELINE_WINDOW, FeedbackSection
from fakevllm.errors import LedgerError
from fakevllm.ledger.feedback_rows import ServedCalls, sample_id
from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.store import Ledger
from fakevllm.settlement.delivery import reason_of
from fakevllm.settlement.feedback_values import (
    TOO_SMALL,
    baseline_of,
)
from fakevllm.swarm.errors import is_passing, mend_of
from fakevllm.swarm.link import SwarmLink
from fakevllm_adapters.protocol.swarm import MAX_SAMPLE_CALLS, AddSampleRequest

log = logging.getLogger("fakevllm.settlement.feedback_values")

PAUSE_S = 1.0
"""After trouble."""


class LateSamples:
    def __init__(self, settings: FeedbackSection, ledger: Ledger, link: SwarmLink) -> None:
        self._settings = settings
        self._ledger = ledger
        self._link = link
        self._woken = asyncio.Event()
        self._woken.set()  # earlier lives may have left something
        self._blocked: set[str] = set()
        """Groups that are to be settled before what was said of them is sent."""
        self._settled: set[str] | None = None
        """While it looks what there is: groups that were settled meanwhile."""

    def wake(self) -> None:
        """There is something to send."""
        self._woken.set()

    def group_settled(self, group_id: str) -> None:
        if self._settled is not None:
            self._settled.add(group_id)
        if group_id in self._blocked:
            self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._woken.wait()
            await self._link.serving.wait()  # before, the server takes no samples
            self._woken.clear()
            try:
                for key in await self._ready():
                    await self._send(*key)
            except Exception as error:  # isolates: what waits is tried again
                why = str(error) if isinstance(error, LedgerError) else mend_of(error)
                log.warning("feedback waits: %s", why)
                await asyncio.sleep(PAUSE_S)
                self._woken.set()

    async def _ready(self) -> list[tuple[str, str]]:
        """Group and feedback id of what can be measured and whose group is settled."""
        settled = self._settled = set[str]()
        try:
            await self._ledger.flush()
            found = await asyncio.to_thread(
                self._ledger.feedback.with_baseline, self._settings.num_for_baseline
            )
        finally:
            self._settled = None
        self._blocked = {group_id for group_id, _, is_settled in found if not is_settled}
        if self._blocked & settled:
            self._woken.set()
        return [(group_id, name) for group_id, name, is_settled in found if is_settled]

    async def _send(self, group_id: str, feedback_id: str) -> None:
        """Raises what passes; any other trouble ends this feedback."""
        rows = self._ledger.feedback
        row = await asyncio.to_thread(rows.waiting, group_id, feedback_id)
        if row is None:  # taken back or replaced meanwhile
            return
        others = await asyncio.to_thread(rows.other_values, row, BASELINE_WINDOW)
        baseline = baseline_of(others, self._settings.num_for_baseline)
        if baseline is None:
            return
        assert row.value is not None, "what waits counts for something"
        advantage = self._settings.weight * (row.value - baseline)
        if abs(advantage) < TOO_SMALL:
            rows.set_outcome(
                row, FeedbackState.DROPPED, "same_as_all", baseline=baseline, amount=0.0
            )
            return
        found = await asyncio.to_thread(rows.served_calls, group_id)
        reason = _why_not(found)
        if reason is not None:
            rows.set_outcome(row, FeedbackState.KEPT, reason)
            return
        # Once more, now that its calls are read: it may be being taken back.
        if not await self._ledger.flush():
            raise LedgerError("the ledger cannot be written")
        if await asyncio.to_thread(rows.waiting, group_id, feedback_id) is None:
            return
        state, reason = await self._added(row, found, advantage)
        rows.set_outcome(row, state, reason, baseline=baseline, amount=advantage)

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
            log.warning(
                "feedback about %s is lost: %s",
                row.group_id,
                mend_of(error),
                extra={"group": row.group_id},
            )
            return FeedbackState.LOST, reason_of(error)
        if not reply.success:
            return FeedbackState.LOST, reply.failure_reason
        state = FeedbackState.POOLED if reply.pooled else FeedbackState.DROPPED
        return state, reply.failure_reason or None


def _why_not(found: ServedCalls) -> str | None:
    """Why an answer cannot be trained once more."""
    if not found.calls:
        return "no_calls: the answer's tokens are not in the ledger"
    if len(found.calls) > MAX_SAMPLE_CALLS:
        return f"too_many_calls: {len(found.calls)} of one answer"
    reasons = [call.untrainable for call in found.calls]
    if all(reason is not None for reason in reasons):
        return f"no_trainable_call: {reasons[0]}"
    if not found.is_unshaped:
        return "shaped: what its tokens were chosen from is known to the server's group alone"
    return None
