"""The service for feedback about answers.

Each feedback is stored in the ledger, which is the proxy's database. The `on_feedback` hook
computes the value of the feedback. A group is a request with all its sampled answers. If the
rewards of the answer's group have not been sent to the server yet, the value is added to the served
answer's reward. Otherwise the feedback becomes a training sample of its own.

If the proxy stops before it has processed stored feedback, the next proxy process processes this
feedback.
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
from fakevllm.hooks.hook_versions import HookVersions
from fakevllm.hooks.results import FeedbackValue, HookFailure
from fakevllm.hooks.spec import Feedback
from fakevllm.hooks.version_leases import Use
from fakevllm.ledger.records import REPLACED, TAKEN_BACK, FeedbackRecord, FeedbackState
from fakevllm.ledger.store import Ledger
from fakevllm.ledger.writer import WriteReceipt
from fakevllm.metrics import Metrics
from fakevllm.runtime.task_set import TaskSet
from fakevllm.sessions.types import Kind, Place
from fakevllm.settlement.edit_samples import EditSamples
from fakevllm.settlement.feedback_to_reward import (
    FeedbackBody,
    FeedbackIdConflict,
    identify,
    replaceable,
    value_of,
)
from fakevllm.settlement.feedback_view import FeedbackSubject, hook_argument, read_subject
from fakevllm.settlement.late_feedback import LateSamples
from fakevllm.settlement.reward_delivery import Delivery
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.patterns import marker
from fakevllm_adapters.privacy.redactor import UNREADABLE
from fakevllm_adapters.protocol.errors import WireError, bad_request, error_body, unavailable

log = logging.getLogger("fakevllm.settlement.feedback_to_reward")

FLUSH_S = 5.0
"""Maximum number of seconds to wait for queued ledger writes. After that, the app gets an error and
must retry."""
_IMPLICIT_KINDS = {Kind.REGENERATES: "regenerate"}
"""Kind of the implicit feedback, by the kind of the new request. If a request of any other kind is
feedback, the feedback has the kind `next_message`."""
_NO_FEEDBACK = (Kind.SIDE, Kind.REPEATS, Kind.PARALLEL, Kind.NEW, Kind.SUB_AGENT)


class FeedbackService:
    """The service that accepts explicit feedback from apps and detects implicit feedback. The
    user's next message, or the request for another answer, is implicit feedback about an answer.
    Feedback that is not processed when the service is closed is processed by the next proxy
    process."""

    def __init__(
        self,
        settings: FeedbackSection,
        ledger: Ledger,
        delivery: Delivery,
        late: LateSamples,
        edits: EditSamples,
        hooks: HookVersions | None,
        tasks: TaskIndex,
        metrics: Metrics,
        redaction: RedactionInUse,
    ) -> None:
        self._redaction = redaction
        self._weight = settings.weight
        self._ledger = ledger
        self._delivery = delivery
        self._late = late
        self._edits = edits
        self._hooks = hooks
        self._tasks = tasks
        self._metrics = metrics
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by group id. The lock of a group is held while feedback about its answer is stored.
        Therefore the same feedback, sent twice at the same time, is stored only once. The lock is
        also held while a value is added to the reward, because new feedback may take back the
        feedback that this value belongs to."""
        self._in_progress: dict[tuple[str, str], bool] = {}
        """Feedback that is being processed, by group id and feedback id. The dict's value is False
        once the feedback was taken back or replaced."""
        self._background = TaskSet(log, "feedback could not be processed")

    def restore(self) -> None:
        """Process the feedback that an earlier proxy process stored but did not process. Call this
        method before the groups of earlier processes are sent. The value of the feedback can then
        still be added to the rewards of these groups."""
        for row in self._ledger.feedback.in_state(FeedbackState.RECEIVED):
            self._start(row)

    async def close(self) -> None:
        await self._background.close()

    async def accept(self, body: FeedbackBody, app_key: str | None) -> tuple[FeedbackRecord, bool]:
        """Store feedback. Return a pair: the feedback's row in the ledger, and whether this
        feedback was already stored before the call.

        If `body.any_key` is true, the answer may have been given to any app. In this case, the
        caller must have checked that `app_key` is an admin's key. The feedback is stored as
        feedback from `app_key`.

        Raises WireError with status 404 if this app received no answer with the given id. The
        status is 400 if the `feedback_id` was used before for other feedback. The status is 503 if
        the ledger cannot be written.
        """
        owner = await self._owner(body.id) if body.any_key else app_key
        group_id = await self._find(body.id, owner)
        # Redacted here, because a repetition is compared with the stored row.
        body = body.model_copy(
            update={"comment": self._redacted(body.comment), "edited": self._redacted(body.edited)}
        )
        self._delivery.feedback_started(group_id)  # the group must not be sent meanwhile
        try:
            async with self._lock(group_id):
                row, is_new = await self._store(body, group_id, app_key)
                if is_new:
                    self._metrics.feedback_received("feedback")
                self._start(row)
        finally:
            self._delivery.feedback_finished(group_id, None)
        return row, not is_new

    def _redacted(self, text: str | None) -> str | None:
        if text is None:
            return None
        if not self._redaction.is_complete:
            return marker(UNREADABLE)
        return self._redaction.redactor.text(text)

    def request_placed(self, group_id: str, place: Place | None, text: str) -> None:
        """Treat a new request as implicit feedback about an earlier answer of its session. Some
        kinds of requests say nothing about that answer. For these kinds, this method does nothing.

        For all other kinds, also release the groups of the session's earlier turns, so that these
        groups no longer wait for feedback.

        `text` is the request's last user message.
        """
        if place is None or place.kind in _NO_FEEDBACK:
            return
        preceding = self._delivery.preceding_group(place)
        if self._has_hook(preceding):
            if preceding is not None:
                self._delivery.feedback_started(preceding)
            self._background.start(self._process_implicit(group_id, preceding, place, text))
        self._delivery.release_earlier_turns(place)

    # --- storing

    async def _owner(self, name: str) -> str | None:
        """Return the fingerprint of the API key that received the answer with the id `name`, or
        None if the key is unknown."""
        await self._ledger.flush(FLUSH_S)
        return await asyncio.to_thread(self._ledger.feedback.owner_of, name)

    async def _find(self, name: str, app_key: str | None) -> str:
        """Return the id of the group whose answer has the id `name`. Raises WireError (404) if the
        app received no answer with this id."""
        group_id = self._delivery.find(name, app_key)
        if group_id is None:
            await self._ledger.flush(FLUSH_S)  # the answer may be an instant old
            group_id = await asyncio.to_thread(self._ledger.feedback.find_group, name, app_key)
        if group_id is None:
            message = (
                f"No answer `{name}` was given to this API key: "
                "send the id of the response, with the API key of its request. Answers that are "
                "not stored (X-Fakevllm-Store: none) take no feedback."
            )
            raise WireError(404, error_body(message, "NotFoundError", 404, "id"))
        return group_id

    async def _store(
        self, body: FeedbackBody, group_id: str, app_key: str | None
    ) -> tuple[FeedbackRecord, bool]:
        """Store feedback if it is not stored yet. Return a pair: the feedback's row in the ledger,
        and whether the feedback is new. Raises WireError with status 400 if the `feedback_id` was
        used for other feedback. Raises WireError with status 503 if the ledger cannot be written.
        """
        rows = self._ledger.feedback
        is_flushed = await self._ledger.flush(FLUSH_S)
        earlier = await asyncio.to_thread(rows.of_group, group_id)
        try:
            feedback_id, known = identify(body, earlier)
        except FeedbackIdConflict:
            raise bad_request(
                f"`feedback_id` {body.feedback_id!r} names other feedback about this answer: "
                "choose another id.",
                "feedback_id",
            ) from None
        if known is not None:
            return known, False
        row = FeedbackRecord(
            group_id=group_id,
            feedback_id=feedback_id,
            received_at=time.time(),
            app_key=app_key,
            edit_state=None if body.edited is None else self._edits.first_state,
            **body.content,
        )
        if body.is_withdrawal:
            row = replace(row, state=FeedbackState.KEPT, reason=TAKEN_BACK)
        receipts = [rows.record(row)]
        if body.is_withdrawal or body.value is not None:
            reason = TAKEN_BACK if body.is_withdrawal else REPLACED
            receipts += [self._void(old, reason) for old in replaceable(earlier)]
        if body.is_withdrawal or body.edited is not None:
            reason = TAKEN_BACK if body.is_withdrawal else REPLACED
            receipts.append(self._ledger.edits.void_earlier(row, reason))
        if body.is_withdrawal:
            receipts.append(rows.mark_too_late(row))
        if not (is_flushed and await self._ledger.is_written(*receipts, timeout_s=FLUSH_S)):
            raise unavailable("The feedback could not be stored. Try again shortly.")
        if body.is_withdrawal:  # only the ledger knows whether it came too late
            stored = await asyncio.to_thread(rows.of_group, group_id)
            row = next(old for old in stored if old.feedback_id == feedback_id)
        return row, True

    # --- processing

    def _start(self, row: FeedbackRecord) -> None:
        """Start a background task that processes the feedback. If the feedback was processed
        already or is being processed, do nothing."""
        key = (row.group_id, row.feedback_id)
        if row.state == FeedbackState.RECEIVED and key not in self._in_progress:
            self._in_progress[key] = True
            self._delivery.feedback_started(row.group_id)
            self._background.start(self._finish(row.group_id, partial(self._process, row)))

    async def _finish(
        self, group_id: str, process: Callable[[], Coroutine[Any, Any, float | None]]
    ) -> None:
        """Run `process`, which processes one feedback and returns the amount to add to the group's
        reward. Then pass this amount to `feedback_finished`. From then on, the group may be sent to
        the server.

        If the proxy stops while `process` runs, this method is cancelled before it calls
        `feedback_finished`, and this proxy process does not send the group. Sending would be wrong:
        the ledger may already contain the amount, but the reward in memory does not. The next proxy
        process sends the group with the amount.
        """
        try:
            amount = await process()
        except Exception:
            self._delivery.feedback_finished(group_id, None)
            raise
        self._delivery.feedback_finished(group_id, amount)

    async def _process(self, row: FeedbackRecord) -> float | None:
        key = (row.group_id, row.feedback_id)
        try:
            await self._delivery.wait_recorded(row.group_id)
            if row.edit_state is not None:
                self._edits.wake()
            value = await self._value(row)
            async with self._lock(row.group_id):
                return await self._amount(row, value) if self._in_progress[key] else None
        finally:
            del self._in_progress[key]

    def _lock(self, group_id: str) -> asyncio.Lock:
        return self._locks.setdefault(group_id, asyncio.Lock())

    def _void(self, row: FeedbackRecord, reason: str) -> WriteReceipt:
        """Mark feedback as void, because the app took it back or replaced it. Feedback that was
        already added to a reward or sent as a sample stays unchanged."""
        key = (row.group_id, row.feedback_id)
        if key in self._in_progress:
            self._in_progress[key] = False
        return self._ledger.feedback.void(row, reason)

    async def _amount(
        self,
        row: FeedbackRecord,
        value: FeedbackValue | HookFailure,
        recorded: WriteReceipt | None = None,
    ) -> float | None:
        """Record the feedback's value, and return the amount to add to the group's reward.

        Return None if the feedback has no value. Also return None if the group's reward can no
        longer be changed. In this second case, the feedback becomes a training sample of its own.

        The ledger stores the amount before this method returns it. Otherwise the feedback could be
        trained a second time after a restart. `recorded` is the receipt for the queued write of
        `row`, or None if the row is already in the ledger.

        This method must not await anything before its first write is queued. Otherwise the app
        could take the feedback back during the await.
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
        if self._delivery.accepts_feedback(row.group_id):
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
        if not self._has_hook(row.group_id):
            return FeedbackValue(value_of(row.score, row.thumbs))
        subject = await self._subject(row.group_id)
        if subject is None:
            return HookFailure("not_in_ledger: the answer's group was not written")
        task = self._tasks.by_id(subject.group.task_id)
        value = await self._call_hook(row.group_id, hook_argument(subject, task, row))
        return value or FeedbackValue(value_of(row.score, row.thumbs))

    def _has_hook(self, group_id: str | None) -> bool:
        """Return True if the hooks that the group uses have `on_feedback`."""
        return self._hooks is not None and self._hooks.of_group(group_id).info.has_feedback

    async def _call_hook(
        self, group_id: str, feedback: Feedback
    ) -> FeedbackValue | HookFailure | None:
        """Call `on_feedback` of the hooks that the group uses, or of the newest hooks if the
        group's reward is final. Return None if these hooks do not have `on_feedback`."""
        assert self._hooks is not None, "only hooks are called"
        with self._hooks.using(group_id, Use.CALL) as hooks:
            return await hooks.feedback(feedback) if hooks.info.has_feedback else None

    async def _process_implicit(
        self, group_id: str, preceding: str | None, place: Place, text: str
    ) -> None:
        """Process the request `group_id` as implicit feedback about an earlier answer. `preceding`
        is the id of the earlier answer's group, if the group has not been sent to the server yet.
        If `preceding` is None, search the ledger for the group."""
        if preceding is None:
            preceding = await self._find_preceding(group_id, place)
            if preceding is None:
                return
            self._delivery.feedback_started(preceding)
        process = partial(self._implicit_amount, preceding, group_id, place, text)
        await self._finish(preceding, process)

    async def _implicit_amount(
        self, preceding: str, group_id: str, place: Place, text: str
    ) -> float | None:
        await self._delivery.wait_recorded(preceding)
        subject = await self._subject(preceding)
        if subject is None:
            return None
        kind = _IMPLICIT_KINDS.get(place.kind, "next_message")
        row = FeedbackRecord(
            group_id=preceding,
            feedback_id=f"{kind}.{group_id}",
            received_at=time.time(),
            app_key=subject.group.app_key,
            kind=kind,
            state=FeedbackState.KEPT,  # the outcome, if it counts, replaces it
            reason="not_heard",
        )
        task = self._tasks.by_id(subject.group.task_id)
        value = await self._call_hook(preceding, hook_argument(subject, task, row, text))
        if value is None or (isinstance(value, FeedbackValue) and value.value is None):
            return None
        recorded = self._ledger.feedback.record(row)
        self._metrics.feedback_received(kind)
        return await self._amount(row, value, recorded)

    async def _find_preceding(self, group_id: str, place: Place) -> str | None:
        await self._ledger.flush(FLUSH_S)
        return await asyncio.to_thread(self._ledger.feedback.preceding_group, place, group_id)

    async def _subject(self, group_id: str) -> FeedbackSubject | None:
        """Read the answered request that the feedback is about. Return None if the ledger does not
        have the group, or if the app got no answer."""
        await self._ledger.flush(FLUSH_S)
        return await asyncio.to_thread(read_subject, self._ledger, group_id)
