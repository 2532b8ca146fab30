"""Takes what is said of answers: into the ledger, past the hook, then into the group that still
waits for it, or to those that are trained by themselves.

What has been taken is heard, by this life of the proxy or the next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from fakevllm.admission.task_index import TaskIndex
from fakevllm.config.reward import FeedbackSection
from fakevllm.hooks.results import FeedbackValue, HookFailure
from fakevllm.hooks.worker import HookWorker
from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.store import Ledger
from fakevllm.ledger.writer import WriteReceipt
from fakevllm.metrics import Metrics
from fakevllm.runtime.task_set import TaskSet
from fakevllm.sessions.types import Kind, Place
from fakevllm.settlement.delivery import Delivery
from fakevllm.settlement.feedback_values import (
    FeedbackBody,
    OtherContent,
    id_of,
    value_of,
    voided,
)
from fakevllm.settlement.feedback_view import Answered, answered_in, shown
from fakevllm.settlement.late_samples import LateSamples
from fakevllm_adapters.protocol.errors import WireError, bad_request, error_body, unavailable

log = logging.getLogger("fakevllm.settlement.feedback_values")

FLUSH_S = 5.0
"""For what is on its way into the ledger, before an app is told to try again."""
_SIGNALS = {Kind.REGENERATES: "regenerate"}
"""What a request's kind says of the answer before it; any other is the next message."""
_SAY_NOTHING = (Kind.SIDE, Kind.REPEATS, Kind.PARALLEL, Kind.NEW, Kind.SUB_AGENT)


class FeedbackService:
    """close() last; it leaves for the next life what is not heard yet."""

    def __init__(
        self,
        settings: FeedbackSection,
        ledger: Ledger,
        settling: Delivery,
        late: LateSamples,
        hooks: HookWorker | None,
        tasks: TaskIndex,
        metrics: Metrics,
    ) -> None:
        self._weight = settings.weight
        self._ledger = ledger
        self._settling = settling
        self._late = late
        self._hooks = hooks
        self._tasks = tasks
        self._metrics = metrics
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By group: what is said of an answer is taken one by one, for the same twice at once is
        one feedback. Nor does it come to count meanwhile, for it may be taken back."""
        self._hearing: dict[tuple[str, str], bool] = {}
        """By group and feedback id, of those under way: whether they still count."""
        self._background = TaskSet(log, "feedback could not be heard")

    def restore(self) -> None:
        """Hears what an earlier life had taken. Before groups of earlier lives are sent."""
        for row in self._ledger.feedback.in_state(FeedbackState.RECEIVED):
            self._begin(row)

    async def close(self) -> None:
        await self._background.close()

    async def take(self, said: FeedbackBody, app_key: str | None) -> tuple[FeedbackRecord, bool]:
        """The feedback as it is in the ledger, and whether it was there before. Raises
        WireError."""
        group_id = await self._find(said.id, app_key)
        self._settling.hear(group_id)  # it must not be sent meanwhile
        try:
            async with self._turn(group_id):
                row, is_new = await self._keep(said, group_id, app_key)
                if is_new:
                    self._metrics.feedback_received("feedback")
                self._begin(row)
        finally:
            self._settling.heard(group_id, None)
        return row, not is_new

    def followed(self, group_id: str, place: Place | None, text: str) -> None:
        """A request has been placed: it says something of an earlier answer of its session, whose
        turns so far are held no longer."""
        if place is None or place.kind in _SAY_NOTHING:
            return
        if self._hooks is not None and self._hooks.info.has_feedback:
            before = self._settling.before(place)
            if before is not None:
                self._settling.hear(before)
            self._background.start(self._hear_signal(group_id, before, place, text))
        self._settling.moved_on(place)

    # --- at the door

    async def _find(self, name: str, app_key: str | None) -> str:
        """The group. Raises WireError (404)."""
        found = self._settling.find(name, app_key)
        if found is None:
            await self._ledger.flush(FLUSH_S)  # it may have been answered an instant ago
            found = await asyncio.to_thread(self._ledger.feedback.find_group, name, app_key)
        if found is None:
            message = (
                f"No answer `{name}` was given to this API key: "
                "send the id of the response, with the key it was asked with."
            )
            raise WireError(404, error_body(message, "NotFoundError", 404, "id"))
        return found

    async def _keep(
        self, said: FeedbackBody, group_id: str, app_key: str | None
    ) -> tuple[FeedbackRecord, bool]:
        """Raises WireError."""
        rows = self._ledger.feedback
        is_flushed = await self._ledger.flush(FLUSH_S)
        earlier = await asyncio.to_thread(rows.of_group, group_id)
        try:
            feedback_id, known = id_of(said, earlier)
        except OtherContent:
            raise bad_request(
                f"`feedback_id` {said.feedback_id!r} names other feedback about this answer: "
                "choose another one for this.",
                "feedback_id",
            ) from None
        if known is not None:
            return known, False
        row = FeedbackRecord(
            group_id=group_id,
            feedback_id=feedback_id,
            received_at=time.time(),
            app_key=app_key,
            **said.content,
        )
        if said.takes_back:
            row = replace(row, state=FeedbackState.KEPT, reason="taken_back")
        receipts = [rows.record(row)]
        if said.takes_back or said.value is not None:
            reason = "taken_back" if said.takes_back else "replaced"
            receipts += [self._void(one, reason) for one in voided(earlier)]
        if said.takes_back:
            receipts.append(rows.mark_too_late(row))
        if not (is_flushed and await self._ledger.is_written(*receipts, timeout_s=FLUSH_S)):
            raise unavailable("The feedback could not be kept. Try again shortly.")
        if said.takes_back:  # what came of it is known to the ledger
            found = await asyncio.to_thread(rows.of_group, group_id)
            row = next(one for one in found if one.feedback_id == feedback_id)
        return row, True

    # --- behind it

    def _begin(self, row: FeedbackRecord) -> None:
        """Hears it, unless that has been done or is."""
        key = (row.group_id, row.feedback_id)
        if row.state == FeedbackState.RECEIVED and key not in self._hearing:
            self._hearing[key] = True
            self._settling.hear(row.group_id)
            self._background.start(self._heard(row.group_id, partial(self._hear, row)))

    async def _heard(
        self, group_id: str, hearing: Callable[[], Coroutine[Any, Any, float | None]]
    ) -> None:
        """Ends what `Delivery.hear` began. A stop does not: the group must not be sent without what
        the ledger says was added to it, and is left to the next life."""
        try:
            amount = await hearing()
        except Exception:
            self._settling.heard(group_id, None)
            raise
        self._settling.heard(group_id, amount)

    async def _hear(self, row: FeedbackRecord) -> float | None:
        key = (row.group_id, row.feedback_id)
        try:
            await self._settling.until_over(row.group_id)
            value = await self._value(row)
            async with self._turn(row.group_id):
                return await self._amount(row, value) if self._hearing[key] else None
        finally:
            del self._hearing[key]

    def _turn(self, group_id: str) -> asyncio.Lock:
        return self._turns.setdefault(group_id, asyncio.Lock())

    def _void(self, row: FeedbackRecord, reason: str) -> WriteReceipt:
        """It counts for nothing, unless it has been sent."""
        key = (row.group_id, row.feedback_id)
        if key in self._hearing:
            self._hearing[key] = False
        return self._ledger.feedback.void(row, reason)

    async def _amount(
        self,
        row: FeedbackRecord,
        value: FeedbackValue | HookFailure,
        recorded: WriteReceipt | None = None,
    ) -> float | None:
        """What is to be added to the group's reward: nothing that is not in the ledger, or it could
        be trained once more. Awaits nothing before it writes.

        `recorded` is the receipt of `row`; None if the ledger is known to have the row.
        """
        rows = self._ledger.feedback
        if isinstance(value, HookFailure):
            log.warning(
                "feedback about %s counts for nothing: %s",
                row.group_id,
                value.reason,
                extra={"group": row.group_id},
            )
            rows.set_outcome(row, FeedbackState.KEPT, value.reason)
            return None
        number, hook_hash = value.value, value.hook_hash or None
        if number is None:
            rows.set_outcome(row, FeedbackState.KEPT, "no_number", hook_hash=hook_hash)
            return None
        if self._settling.takes(row.group_id):
            amount = self._weight * number
            joined = rows.set_outcome(
                row, FeedbackState.JOINED, value=number, amount=amount, hook_hash=hook_hash
            )
            receipts = [joined] if recorded is None else [recorded, joined]
            if await self._ledger.is_written(*receipts, timeout_s=FLUSH_S):
                return amount
        rows.set_outcome(row, FeedbackState.WAITING, value=number, hook_hash=hook_hash)
        self._late.wake()
        return None

    async def _value(self, row: FeedbackRecord) -> FeedbackValue | HookFailure:
        if self._hooks is None or not self._hooks.info.has_feedback:
            return FeedbackValue(value_of(row.score, row.thumbs))
        of = await self._answered(row.group_id)
        if of is None:
            return HookFailure("not_in_ledger: the answer's group was not written")
        task = self._tasks.of_id(of.group.task_id)
        return await self._hooks.feedback(shown(of, task, row))

    async def _hear_signal(
        self, group_id: str, before: str | None, place: Place, text: str
    ) -> None:
        """`before`: the group it is said of, where that is known to be held."""
        if before is None:
            before = await self._earlier(group_id, place)
            if before is None:
                return
            self._settling.hear(before)
        await self._heard(before, partial(self._hear_followed, before, group_id, place, text))

    async def _hear_followed(
        self, before: str, group_id: str, place: Place, text: str
    ) -> float | None:
        assert self._hooks is not None
        await self._settling.until_over(before)
        of = await self._answered(before)
        if of is None:
            return None
        kind = _SIGNALS.get(place.kind, "next_message")
        row = FeedbackRecord(
            group_id=before,
            feedback_id=f"{kind}.{group_id}",
            received_at=time.time(),
            app_key=of.group.app_key,
            kind=kind,
            state=FeedbackState.KEPT,  # unless it counts, which is told with it
            reason="not_heard",
        )
        task = self._tasks.of_id(of.group.task_id)
        value = await self._hooks.feedback(shown(of, task, row, text))
        if isinstance(value, FeedbackValue) and value.value is None:
            return None
        recorded = self._ledger.feedback.record(row)
        self._metrics.feedback_received(kind)
        return await self._amount(row, value, recorded)

    async def _earlier(self, group_id: str, place: Place) -> str | None:
        await self._ledger.flush(FLUSH_S)
        return await asyncio.to_thread(self._ledger.feedback.preceding_group, place, group_id)

    async def _answered(self, group_id: str) -> Answered | None:
        """None where the ledger could not be written, or nothing was served."""
        await self._ledger.flush(FLUSH_S)
        return await asyncio.to_thread(answered_in, self._ledger, group_id)
