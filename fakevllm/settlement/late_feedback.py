"""Training samples from late feedback. Feedback is late if it arrived after the group of its answer
was sent to the server.

Each late feedback becomes a sample of its own. The sample is the served answer, with the advantage
`weight * (value - baseline)`. The baseline is the mean value of the app's other feedback. The
server accepts each sample at most once.
"""

from __future__ import annotations

import asyncio
import logging

from fakevllm.config.reward import BASELINE_WINDOW, FeedbackSection
from fakevllm.errors import LedgerError
from fakevllm.ledger.feedback_rows import ServedCalls, sample_id
from fakevllm.ledger.reasons import EndReason
from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.redacted_records import REDACTED
from fakevllm.ledger.store import Ledger
from fakevllm.release.arms import OTHER_ARM
from fakevllm.settlement.feedback_to_reward import MIN_ADVANTAGE, baseline_of
from fakevllm.settlement.held_out_groups import HELD_OUT, HeldOutGroups
from fakevllm.settlement.reward_delivery import reason_of
from fakevllm.settlement.sending_loop import TRAINED_ARMS, Candidate, SendingLoop, outcome_of
from fakevllm.swarm.errors import describe_error, is_transient
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm_adapters.protocol.swarm import MAX_SAMPLE_CALLS, AddSampleRequest

log = logging.getLogger("fakevllm.settlement.feedback_to_reward")


class LateSamples:
    """The background task that sends late feedback to the server as training samples. Feedback is
    late if it arrived after the group of its answer was sent."""

    def __init__(
        self,
        settings: FeedbackSection,
        ledger: Ledger,
        link: SwarmLink,
        held_out: HeldOutGroups,
    ) -> None:
        """Create the background task. `held_out` finds the groups that quote a held-out row. Such
        groups must not be trained."""
        self._settings = settings
        self._held_out = held_out
        self._ledger = ledger
        self._link = link
        self._loop = SendingLoop("late feedback", link.serving, self._waiting, self._send)

    def wake(self) -> None:
        """Wake the background task, so that it looks for feedback to send."""
        self._loop.wake()

    def group_settled(self, group_id: str) -> None:
        """Record that the server's decision about a group is known. If feedback about this group
        waited for the decision, wake the background task. The task then sends the feedback."""
        self._loop.group_settled(group_id)

    async def run(self) -> None:
        """Send late feedback to the server until cancelled."""
        await self._loop.run()

    async def _waiting(self) -> list[Candidate]:
        """Return the feedback that waits to be sent and for which a baseline can be computed. For
        each feedback, the result also says whether the server has acknowledged the rewards of the
        group."""
        await self._ledger.flush()
        num = self._settings.num_for_baseline
        return await asyncio.to_thread(self._ledger.feedback.with_baseline, num)

    async def _send(self, group_id: str, feedback_id: str) -> None:
        """Send one feedback to the server as a training sample, if a sample can be made from the
        feedback. Raises an error if a later attempt may succeed. After any other error, the
        feedback is recorded as lost."""
        rows = self._ledger.feedback
        row = await asyncio.to_thread(rows.waiting, group_id, feedback_id)
        if row is None:  # taken back or replaced meanwhile
            return
        if await asyncio.to_thread(rows.arm_of, group_id) not in TRAINED_ARMS:
            rows.set_outcome(row, FeedbackState.KEPT, OTHER_ARM)
            return
        others = await asyncio.to_thread(rows.other_values, row, BASELINE_WINDOW)
        baseline = baseline_of(others, self._settings.num_for_baseline)
        if baseline is None:
            return
        assert row.value is not None, "waiting feedback has a value"
        advantage = self._settings.weight * (row.value - baseline)
        if abs(advantage) < MIN_ADVANTAGE:
            rows.set_outcome(
                row, FeedbackState.DROPPED, "same_as_all", baseline=baseline, amount=0.0
            )
            return
        served = await asyncio.to_thread(rows.served_calls, group_id)
        reason = _untrainable_reason(served)
        if reason is None and await self._held_out.contains(group_id):
            reason = HELD_OUT
        if reason is None and await asyncio.to_thread(self._is_redacted, group_id):
            reason = REDACTED
        if reason is not None:
            rows.set_outcome(row, FeedbackState.KEPT, reason)
            return
        # Read the feedback once more after its calls: it may have been taken back meanwhile.
        if not await self._ledger.flush():
            raise LedgerError("the ledger cannot be written")
        if await asyncio.to_thread(rows.waiting, group_id, feedback_id) is None:
            return
        state, reason = await self._add_sample(row, served, advantage)
        rows.set_outcome(row, state, reason, baseline=baseline, amount=advantage)

    def _is_redacted(self, group_id: str) -> bool:
        """Return True if the present settings redact a text of the request or of the served answer.
        The method blocks the thread."""
        record = self._ledger.group(group_id)
        if record is None:
            return False
        hidden = self._ledger.parts_to_redact(record)
        return hidden.has_request or record.served_index in hidden.siblings

    async def _add_sample(
        self, row: FeedbackRecord, served: ServedCalls, advantage: float
    ) -> tuple[FeedbackState, str | None]:
        try:
            reply = await self._link.add_sample(
                AddSampleRequest(
                    sample_id=sample_id(row),
                    run_id=served.run_id or "",
                    advantage=advantage,
                    calls=served.calls,
                )
            )
        except Exception as error:  # isolates: one odd feedback must not hold up the others
            if is_transient(error):
                raise
            log.warning(
                "feedback about %s is lost: the swarm server %s",
                row.group_id,
                describe_error(error),
                extra={"group": row.group_id},
            )
            return FeedbackState.LOST, reason_of(error)
        return outcome_of(reply)


def _untrainable_reason(served: ServedCalls) -> str | None:
    """Return the reason why an answer cannot become a training sample. Return None if the answer
    can become one."""
    if not served.calls:
        return "no_calls: the answer's tokens are not in the ledger"
    if len(served.calls) > MAX_SAMPLE_CALLS:
        return f"too_many_calls: {len(served.calls)} of one answer"
    reasons = [call.untrainable for call in served.calls]
    if all(reason is not None for reason in reasons):
        return f"{EndReason.NO_TRAINABLE_CALL}: {reasons[0]}"
    if not served.is_unshaped:
        return "shaped: what its tokens were chosen from is known to the server's group alone"
    return None
