"""What happens to a group once the app has been answered: into the ledger, then to the server.

A group lies in the ledger as `scored` before its rewards leave, and may be held there for what is
said of its answer. What a stop or a crash kept from being sent is sent by the next life, without
the rest of its window; the server takes each group once.
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

from fakevllm.ledger.records import GroupRecord, ScoredGroup
from fakevllm.ledger.store import Ledger
from fakevllm.ledger.writer import WriteReceipt
from fakevllm.runtime.task_set import TaskSet
from fakevllm.sessions.types import Place
from fakevllm.settlement.pending_groups import PendingGroups
from fakevllm.swarm.errors import is_passing, mend_of
from fakevllm.swarm.link import SwarmLink
from fakevllm_adapters.protocol.swarm import EndGroupReply, EndGroupRequest

log = logging.getLogger("fakevllm.settlement.delivery")

CLOSE_GRACE_S = 10.0
"""For groups that are being settled when the proxy stops."""
RESEND_PAUSE_S = 1.0
"""After the server failed in the middle of taking a group."""
ACKNOWLEDGED_BEFORE = 409
"""The server has taken the group, with other rewards."""


class Delivery:
    """Settles groups beside the app's requests; close() last."""

    def __init__(
        self,
        ledger: Ledger,
        link: SwarmLink,
        window_s: float = 0.0,
        on_settled: Callable[[str], None] = lambda group_id: None,
    ) -> None:
        """`window_s`: seconds for which a scored group is held for feedback about its answer.
        `on_settled`: called with a group's id once its outcome is queued for the ledger."""
        self._ledger = ledger
        self._link = link
        self._holding = PendingGroups(window_s)
        self._changed: dict[str, asyncio.Event] = {}
        """Of groups that somebody waits for."""
        self._background = TaskSet(log, "a group could not be settled")
        self._held: set[asyncio.Task[None]] = set()
        """Its tasks that wait for what is said, or for the server."""
        self._resending: asyncio.Task[None] | None = None
        self._is_closing = False
        self._on_settled = on_settled

    @property
    def num_unsettled(self) -> int:
        """Groups of this life that the server has not taken yet."""
        return len(self._background)

    # --- what is said of an answer

    def answered(
        self, group_id: str, answer_id: str | None, app_key: str | None, place: Place | None
    ) -> None:
        """The app has its answer, or is about to: from now on it may say something of it."""
        self._holding.answered(group_id, answer_id, app_key, place)

    def find(self, name: str, app_key: str | None) -> str | None:
        """The group not sent yet whose answer that app calls so."""
        return self._holding.find(name, app_key)

    def before(self, place: Place) -> str | None:
        """The group not sent yet of which a request that stands there says something."""
        return self._holding.before(place)

    def hear(self, group_id: str) -> None:
        """Until `heard` the group is not sent, if it has not been."""
        self._holding.hear(group_id)

    def takes(self, group_id: str) -> bool:
        """Whether what is being heard may count in the group."""
        return self._holding.takes(group_id)

    def heard(self, group_id: str, amount: float | None) -> None:
        """The amount, which lies in the ledger by now, is added to the reward of the group's served
        sibling."""
        self._holding.heard(group_id, amount)
        self._wake(group_id)

    def moved_on(self, place: Place) -> None:
        """A session's next turn has come: earlier ones are held no longer."""
        for group_id in self._holding.moved_on(place):
            self._wake(group_id)

    async def until_over(self, group_id: str) -> None:
        """Until the group's record is on its way into the ledger."""
        while not self._holding.is_closed(group_id):
            await self._change(group_id)

    def forget(self, group_id: str) -> None:
        """It has been recorded, and will not be sent."""
        self._holding.send(group_id)
        self._wake(group_id)

    # --- groups

    def settle(self, record: GroupRecord) -> None:
        """Sends the rewards of a scored group; any other is given up at the server."""
        # At once: what is heard of the group from now on is put behind it.
        receipt = self._ledger.record(record)
        is_scored = record.state == "scored"
        work = self._settle(record, receipt) if is_scored else self._abandon(record)
        self._background.start(work)

    def resend(self, groups: Sequence[ScoredGroup]) -> None:
        """Sends what earlier lives left scored, as soon as the server is there."""
        assert self._resending is None, "once, at the start"
        for group in groups:  # what was said of them may not have been heard yet
            self._holding.close(group.group_id, -math.inf, takes=_takes(group))
        self._resending = asyncio.create_task(self._resend(groups))

    async def close(self) -> None:
        if self._resending is not None:
            self._resending.cancel()
            await asyncio.gather(self._resending, return_exceptions=True)
        self._is_closing = True
        for task in list(self._held):
            task.cancel()
        await self._background.close(CLOSE_GRACE_S)

    async def _settle(self, record: GroupRecord, receipt: WriteReceipt) -> None:
        group = _scored(record)
        self._holding.close(group.group_id, time.monotonic(), takes=_takes(group))
        self._wake(group.group_id)
        # A group the server trains on must be found in the ledger, come what may.
        if not await self._ledger.is_written(receipt):
            self.forget(group.group_id)
            self._ledger.settle(record.group_id, "dropped", "ledger_unavailable", None, [])
            self._on_settled(group.group_id)
            return await self._link.abort_group(record.group_id)
        await self._send(await self._with_feedback(group))

    async def _resend(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            await self._link.reached.wait()
            await self._send(await self._with_feedback(group))

    async def _send(self, group: ScoredGroup) -> None:
        """However long the server is away; a stop leaves it to the next life."""
        while True:
            try:
                return await self._end(group)
            except Exception as error:  # isolates: one odd group must not hold up the others
                if not is_passing(error):
                    return self._lose(group.group_id, error)
            with self._leaving():
                await asyncio.sleep(RESEND_PAUSE_S)
                await self._link.reached.wait()

    @contextlib.contextmanager
    def _leaving(self) -> Generator[None]:
        """Around a wait that a stop ends at once: the group stays `scored`, for the next life."""
        own = asyncio.current_task()
        assert own is not None
        if self._is_closing:
            raise asyncio.CancelledError
        self._held.add(own)
        try:
            yield
        finally:
            self._held.discard(own)

    async def _end(self, group: ScoredGroup) -> None:
        end = EndGroupRequest(
            group_id=group.group_id,
            task_id=group.task_id or "",
            rewards=group.rewards,
            served=group.served_index,
            parent_id=group.parent_id,
            metadata={"question": group.question},
        )
        try:
            reply = await self._link.end_group(end)
        except aiohttp.ClientResponseError as error:
            if error.status != ACKNOWLEDGED_BEFORE:
                raise
            # By an earlier life, with other feedback in it: that stands, the log tells the rest.
            reply = EndGroupReply(success=True, pooled=True)
        state = "pooled" if reply.pooled else "dropped"
        self._ledger.settle(
            group.group_id,
            state if reply.success else "lost",
            reply.failure_reason or None,
            reply.step,
            reply.calls,
            reply.run_id,
        )
        self._on_settled(group.group_id)

    async def _with_feedback(self, group: ScoredGroup) -> ScoredGroup:
        """When it need not be held any longer, with what was added meanwhile to its reward."""
        if group.group_id not in self._holding:
            return group
        await self._hold(group.group_id)
        added = self._holding.send(group.group_id)
        self._wake(group.group_id)
        served = group.served_index
        if not added or served is None:
            return group
        own = group.rewards[served]
        rewards = [*group.rewards]
        rewards[served] = None if own is None else own + added
        return replace(group, rewards=rewards)

    async def _hold(self, group_id: str) -> None:
        while (wait_s := self._holding.wait_s(group_id, time.monotonic())) > 0:
            limit_s = None if wait_s == math.inf else wait_s
            with contextlib.suppress(TimeoutError), self._leaving():
                async with asyncio.timeout(limit_s):
                    await self._change(group_id)

    async def _change(self, group_id: str) -> None:
        changed = self._changed.setdefault(group_id, asyncio.Event())
        await changed.wait()

    def _wake(self, group_id: str) -> None:
        changed = self._changed.pop(group_id, None)
        if changed is not None:
            changed.set()

    def _lose(self, group_id: str, error: Exception) -> None:
        log.warning(
            "group %s could not be ended: the swarm server %s",
            group_id,
            mend_of(error),
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
        question=record.question,
        rewards=rewards,
        served_index=record.served_index,
        parent_id=record.parent_id,
    )


def _takes(group: ScoredGroup) -> bool:
    """Whether the served sibling has a reward that something can be added to."""
    served = group.served_index
    return served is not None and group.rewards[served] is not None


def reason_of(error: Exception) -> str:
    """Why the server has not taken something, for the ledger.

    >>> reason_of(TimeoutError())
    'swarm_unreachable'
    """
    if is_passing(error):
        return "swarm_unreachable"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"swarm_refused: {error.status}"
    return f"end_failed: {type(error).__name__}"
