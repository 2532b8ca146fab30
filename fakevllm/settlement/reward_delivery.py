"""Delivery of a group (a request with all its sampled answers) after the app has been answered. The
group is first written to the ledger (the proxy's database) and then sent to the server.

Until the rewards of a group are sent, the group is in the ledger with the state `scored`. In this
state, the group may be held for a time window. Feedback that arrives in this window is added to the
reward.

A stop or a crash may prevent the group from being sent. The next proxy process then sends the group
at once, without waiting for the end of the window. The server accepts each group at most once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import aiohttp

from fakevllm.errors import LedgerError
from fakevllm.ledger.reasons import EndReason
from fakevllm.ledger.records import GroupRecord, ScoredGroup
from fakevllm.ledger.store import Ledger
from fakevllm.ledger.writer import WriteReceipt
from fakevllm.runtime.task_set import TaskSet
from fakevllm.sessions.types import Place
from fakevllm.settlement.held_out_groups import HELD_OUT, HeldOutGroups
from fakevllm.settlement.pending_groups import PendingGroups
from fakevllm.swarm.errors import describe_error, is_transient
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm_adapters.protocol.swarm import EndGroupReply, EndGroupRequest

log = logging.getLogger("fakevllm.settlement.reward_delivery")

CLOSE_GRACE_S = 10.0
"""Seconds for which a proxy that stops waits for groups that are just being sent."""
RESEND_PAUSE_S = 1.0
"""Seconds between two attempts to send a group after a temporary error."""
ALREADY_ACCEPTED = 409
"""HTTP status of the server's reply if the server has already accepted the group with other
rewards."""


class Delivery:
    """The background delivery of groups (requests with their sampled answers) to the ledger (the
    proxy's database) and to the server. Before you close the delivery, close all objects that call
    its methods."""

    def __init__(
        self,
        ledger: Ledger,
        link: SwarmLink,
        window_s: float = 0.0,
        on_settled: Callable[[str], None] = lambda group_id: None,
        *,
        on_final: Callable[[str], None] = lambda group_id: None,
        held_out: HeldOutGroups | None = None,
    ) -> None:
        """Create the delivery. `window_s` is the number of seconds for which a scored group is held
        for feedback about its answer. `on_settled` is called with a group's id when the group's
        outcome is known and its write to the ledger is queued. `on_final` is called with a group's
        id when no feedback can be added to the group's reward any more. `held_out` finds the groups
        of earlier proxy processes that must not be sent, because they quote a held-out dataset
        row."""
        self._held_out = held_out
        self._ledger = ledger
        self._link = link
        self._pending = PendingGroups(window_s)
        self._change_events: dict[str, asyncio.Event] = {}
        """Events by group id. When a group changes, its event is set. The event wakes the tasks
        that wait for a change of this group."""
        self._background = TaskSet(log, "a group could not be settled")
        self._waiting: set[asyncio.Task[None]] = set()
        """Background tasks that wait for feedback or for the server. They are cancelled when the
        proxy stops."""
        self._resending: asyncio.Task[None] | None = None
        self._is_closing = False
        self._on_settled = on_settled
        self._on_final = on_final

    @property
    def num_unsettled(self) -> int:
        """Number of groups of this proxy process whose delivery has not ended yet."""
        return len(self._background)

    # --- feedback

    def register_answer(
        self, group_id: str, answer_id: str | None, app_key: str | None, place: Place | None
    ) -> None:
        """Record that the app gets the answer of this group (a request with its sampled answers)
        now. From now on, the app may send feedback about this answer."""
        self._pending.add(group_id, answer_id, app_key, place)

    def find(self, name: str, app_key: str | None) -> str | None:
        """Return the id of a group (a request with its answers) that has not been sent to the
        server yet. `name` is the id of the group or of the group's answer.

        Return None if this app has no such group.
        """
        return self._pending.find(name, app_key)

    def preceding_group(self, place: Place) -> str | None:
        """Find the group whose answer came before a new request in the session. The new request is
        implicit feedback about this answer. Return the group's id. Return None if there is no such
        group, or if the group has been sent to the server. `place` is the place of the new request
        in its session."""
        return self._pending.preceding_group(place)

    def feedback_started(self, group_id: str) -> None:
        """Hold a group (a request with its answers), because feedback about the group is being
        processed. The group is not sent to the server before `feedback_finished` is called for the
        same feedback. If the group was sent already, do nothing."""
        self._pending.feedback_started(group_id)

    def accepts_feedback(self, group_id: str) -> bool:
        """Return True if feedback may still be added to the reward of the group's answer."""
        return self._pending.accepts_feedback(group_id)

    def feedback_finished(self, group_id: str, amount: float | None) -> None:
        """Record that one piece of feedback about the group has been processed, so that this
        feedback no longer delays the group. If `amount` is not None, add it to the reward of the
        served sibling (the sampled answer that the app got). The amount must be in the ledger (the
        proxy's database) already."""
        self._pending.feedback_finished(group_id, amount)
        self._notify(group_id)

    def release_earlier_turns(self, place: Place) -> None:
        """Let the groups of the session's earlier turns be sent to the server without waiting for
        feedback. Call this method when a new request has begun a later turn. `place` is the place
        of the new request in its session."""
        for group_id in self._pending.release_earlier_turns(place):
            self._notify(group_id)

    async def wait_recorded(self, group_id: str) -> None:
        """Wait until the group's record is queued as a write to the ledger (the proxy's
        database)."""
        while not self._pending.is_recorded(group_id):
            await self._change(group_id)

    def forget(self, group_id: str) -> None:
        """Stop tracking a group that will not be sent to the server. Before this call, queue the
        group's record as a write to the ledger (the proxy's database)."""
        self._remove(group_id)

    # --- groups

    def settle(self, record: GroupRecord) -> None:
        """Write a group (a request with its answers) to the ledger (the proxy's database), and then
        report the group's outcome to the server. For a scored group, the report contains the
        rewards. For any other group, the report says that the group is aborted. This method starts
        this work in the background and returns at once."""
        # The record is queued before this method returns, so that rows of later feedback follow it.
        receipt = self._ledger.record(record)
        is_scored = record.state == "scored"
        work = self._settle(record, receipt) if is_scored else self._abandon(record)
        self._background.start(work)

    def resend(self, groups: Sequence[ScoredGroup]) -> None:
        """Start to send to the server the groups (requests with their answers) that earlier proxy
        processes left in the state `scored`. Sending waits until the server is reachable."""
        assert self._resending is None, "resend is called once, at the start"
        for group in groups:  # feedback about them may not have been processed yet
            self._pending.group_recorded(
                group.group_id, -math.inf, accepts_feedback=_has_served_reward(group)
            )
        self._resending = asyncio.create_task(self._resend(groups))

    async def close(self) -> None:
        """Stop the delivery. Groups (requests with their answers) that were not sent to the server
        keep the state `scored` in the ledger, and the next proxy process sends them."""
        if self._resending is not None:
            self._resending.cancel()
            await asyncio.gather(self._resending, return_exceptions=True)
        self._is_closing = True
        for task in list(self._waiting):
            task.cancel()
        await self._background.close(CLOSE_GRACE_S)

    async def _settle(self, record: GroupRecord, receipt: WriteReceipt) -> None:
        group = _scored(record)
        self._pending.group_recorded(
            group.group_id, time.monotonic(), accepts_feedback=_has_served_reward(group)
        )
        self._notify(group.group_id)
        # The server must never train on a group that is not in the ledger.
        if not await self._ledger.is_written(receipt):
            self.forget(group.group_id)
            self._ledger.settle(
                record.group_id, "dropped", EndReason.LEDGER_UNAVAILABLE.value, None, []
            )
            self._on_settled(group.group_id)
            return await self._link.abort_group(record.group_id)
        await self._send(await self._with_feedback(group))

    async def _resend(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            await self._link.reached.wait()
            try:
                is_held_out = await self._is_held_out(group.group_id)
            except LedgerError as error:  # isolates: one damaged row must not hold up the others
                log.warning("group %s is not sent: %s", group.group_id, error)
                continue
            if is_held_out:
                await self._drop_held_out(group.group_id)
            else:
                await self._send(await self._with_feedback(group))

    async def _is_held_out(self, group_id: str) -> bool:
        return self._held_out is not None and await self._held_out.contains(group_id)

    async def _drop_held_out(self, group_id: str) -> None:
        """Drop a group (a request with its answers) that quotes a held-out dataset row. An earlier
        proxy process scored the group before the row was held out."""
        self.forget(group_id)
        self._ledger.settle(group_id, "dropped", HELD_OUT, None, [])
        self._on_settled(group_id)
        await self._link.abort_group(group_id)

    async def _send(self, group: ScoredGroup) -> None:
        """Send a group (a request with its answers) to the server, and retry for as long as the
        server is unreachable. If the proxy stops before the group was sent, the next proxy process
        sends it."""
        while True:
            try:
                return await self._end(group)
            except Exception as error:  # isolates: one odd group must not hold up the others
                if not is_transient(error):
                    return self._lose(group.group_id, error)
            with self._stoppable_wait():
                await asyncio.sleep(RESEND_PAUSE_S)
                await self._link.reached.wait()

    @contextlib.contextmanager
    def _stoppable_wait(self) -> Generator[None]:
        """Run a `with` block that only waits. When the proxy stops, the block is cancelled at once.

        A group whose wait was cancelled keeps the state `scored` in the ledger (the proxy's
        database), and the next proxy process sends the group.
        """
        task = asyncio.current_task()
        assert task is not None
        if self._is_closing:
            raise asyncio.CancelledError
        self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)

    async def _end(self, group: ScoredGroup) -> None:
        end = EndGroupRequest(
            group_id=group.group_id,
            task_id=group.task_id or "",
            rewards=group.rewards,
            served=group.served_index,
            parent_id=group.parent_id,
            hook_hash=group.hook_hash or "",
        )
        try:
            reply = await self._link.end_group(end)
        except aiohttp.ClientResponseError as error:
            if error.status != ALREADY_ACCEPTED:
                raise
            # An earlier proxy process sent the group with other feedback added. Its rewards stand,
            # and the run log reports the rest of the outcome.
            reply = EndGroupReply(success=True, pooled=True)
        state = "pooled" if reply.pooled else "dropped"
        self._ledger.settle(
            group.group_id,
            state if reply.success else "lost",
            reply.failure_reason or None,
            reply.step,
            reply.calls,
            reply.run_id,
            reply.job_hash,
            reply.prompts,
        )
        self._on_settled(group.group_id)

    async def _with_feedback(self, group: ScoredGroup) -> ScoredGroup:
        """Wait until the group no longer waits for feedback, and return the group. The reward of
        the answer that the app got then includes the feedback."""
        if group.group_id not in self._pending:
            return group
        await self._hold(group.group_id)
        added = self._remove(group.group_id)
        served = group.served_index
        if not added or served is None:
            return group
        own = group.rewards[served]
        rewards = [*group.rewards]
        rewards[served] = None if own is None else own + added
        return replace(group, rewards=rewards)

    def _remove(self, group_id: str) -> float:
        """Stop tracking a group (a request with its answers) whose reward is final, and return the
        amount that feedback adds to this reward."""
        added = self._pending.remove(group_id)
        self._notify(group_id)
        self._on_final(group_id)
        return added

    async def _hold(self, group_id: str) -> None:
        while (wait_s := self._pending.wait_s(group_id, time.monotonic())) > 0:
            limit_s = None if wait_s == math.inf else wait_s
            with contextlib.suppress(TimeoutError), self._stoppable_wait():
                async with asyncio.timeout(limit_s):
                    await self._change(group_id)

    async def _change(self, group_id: str) -> None:
        changed = self._change_events.setdefault(group_id, asyncio.Event())
        await changed.wait()

    def _notify(self, group_id: str) -> None:
        changed = self._change_events.pop(group_id, None)
        if changed is not None:
            changed.set()

    def _lose(self, group_id: str, error: Exception) -> None:
        log.warning(
            "group %s could not be ended: the swarm server %s",
            group_id,
            describe_error(error),
            extra={"group": group_id},
        )
        self.forget(group_id)
        self._ledger.settle(group_id, "lost", reason_of(error), None, [])
        self._on_settled(group_id)

    async def _abandon(self, record: GroupRecord) -> None:
        self.forget(record.group_id)
        await self._link.abort_group(record.group_id)


def _scored(record: GroupRecord) -> ScoredGroup:
    rewards = [sibling.reward for sibling in record.siblings]
    return ScoredGroup(
        group_id=record.group_id,
        task_id=record.task_id,
        rewards=rewards,
        served_index=record.served_index,
        parent_id=record.parent_id,
        hook_hash=record.hook_hash,
    )


def _has_served_reward(group: ScoredGroup) -> bool:
    served = group.served_index
    return served is not None and group.rewards[served] is not None


def reason_of(error: Exception) -> str:
    """Return a short code that says why a request to the server failed.

    >>> reason_of(TimeoutError())
    'swarm_unreachable'
    """
    if is_transient(error):
        return EndReason.SWARM_UNREACHABLE.value
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{EndReason.SWARM_REFUSED}: {error.status}"
    return f"{EndReason.END_FAILED}: {type(error).__name__}"
