"""Open the parts that send the rewards of groups and users' feedback to the server."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from fakevllm.hooks.version_leases import Use
from fakevllm.ledger.store import Ledger
from fakevllm.runtime.task_set import cancel_task
from fakevllm.settlement.edit_samples import EditSamples
from fakevllm.settlement.feedback_service import FeedbackService
from fakevllm.settlement.held_out_groups import HeldOutGroups
from fakevllm.settlement.late_feedback import LateSamples
from fakevllm.settlement.reward_delivery import Delivery
from fakevllm.web.startup.shared_parts import SharedParts


@dataclass(frozen=True, slots=True)
class Settlement:
    """The parts that send rewards and feedback."""

    delivery: Delivery
    feedback: FeedbackService
    late: LateSamples
    edits: EditSamples

    def resume(self, ledger: Ledger, stack: contextlib.AsyncExitStack) -> None:
        """Send the groups that an earlier process has scored, and go on with stored feedback."""
        with ledger.reading():
            # No await between these two: a group's stored feedback must be counted before the group
            # is sent.
            self.delivery.resend(ledger.scored_groups())
            self.feedback.restore()
        for work in (self.late.run(), self.edits.run()):
            stack.push_async_callback(cancel_task, asyncio.create_task(work))


def open_settlement(parts: SharedParts, stack: contextlib.AsyncExitStack) -> Settlement:
    """Create the parts. The caller closes `feedback`, because it must be closed before the pipeline
    is closed, and the delivery after that."""
    settings, ledger, link, hooks = parts.config.feedback, parts.ledger, parts.link, parts.hooks
    held_out = HeldOutGroups(parts.held_out, ledger)
    late = LateSamples(settings, ledger, link, held_out)
    edits = EditSamples(settings, ledger, link, held_out)

    def group_settled(group_id: str) -> None:
        late.group_settled(group_id)
        edits.group_settled(group_id)

    delivery = Delivery(
        ledger,
        link,
        settings.window_s,
        group_settled,
        on_final=lambda group_id: hooks.end(group_id, Use.FEEDBACK) if hooks else None,
        held_out=held_out,
    )
    stack.push_async_callback(delivery.close)
    feedback = FeedbackService(
        settings,
        ledger,
        delivery,
        late,
        edits,
        hooks,
        parts.tasks,
        parts.metrics,
        parts.redaction,
    )
    return Settlement(delivery, feedback, late, edits)
