"""What happens to a group once the app has been answered: into the ledger, then to the server.

A group lies in the ledger as `scored` before its rewards leave. What a stop or a crash kept from
being sent is sent by the next life; the server takes each group once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import aiohttp

from fakevllm.ledger.records import GroupRecord, ScoredGroup
from fakevllm.ledger.store import Ledger
from fakevllm.swarm.link import SwarmLink, is_passing, mend_of
from fakevllm_adapters.swarm import EndGroupRequest

log = logging.getLogger("fakevllm.settling")

CLOSE_GRACE_S = 10.0
"""For groups that are being settled when the proxy stops."""
RESEND_PAUSE_S = 1.0
"""After the server failed in the middle of taking what earlier lives left over."""


class Settling:
    """Settles groups beside the app's requests; close() last."""

    def __init__(self, ledger: Ledger, link: SwarmLink) -> None:
        self._ledger = ledger
        self._link = link
        self._running: set[asyncio.Task[None]] = set()
        self._resending: asyncio.Task[None] | None = None

    def settle(self, record: GroupRecord) -> None:
        """Sends the rewards of a scored group; any other is given up at the server."""
        self._later(self._settle(record) if record.state == "scored" else self._abandon(record))

    def resend(self, groups: Sequence[ScoredGroup]) -> None:
        """Sends what earlier lives left scored, as soon as the server is there."""
        assert self._resending is None, "once, at the start"
        self._resending = asyncio.create_task(self._resend(groups))

    async def close(self) -> None:
        if self._resending is not None:
            self._resending.cancel()
            await asyncio.gather(self._resending, return_exceptions=True)
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=CLOSE_GRACE_S)
            for task in late:  # stays `scored`: the next life sends it
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _settle(self, record: GroupRecord) -> None:
        dropped_before = self._ledger.health.dropped
        self._ledger.record(record)
        # A group the server trains on must be found in the ledger, come what may.
        is_flushed = await self._ledger.flush()
        if not is_flushed or self._ledger.health.dropped > dropped_before:
            self._ledger.settle(record.group_id, "dropped", "ledger_unavailable", None, [])
            return await self._link.abort_group(record.group_id)
        try:
            await self._end(_scored(record))
        except Exception as error:  # isolates: whatever it is, the group must not stay `scored`
            self._lose(record.group_id, error)

    async def _resend(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            while True:
                await self._link.reached.wait()
                try:
                    await self._end(group)
                except Exception as error:  # isolates: one odd group must not hold up the others
                    if is_passing(error):
                        await asyncio.sleep(RESEND_PAUSE_S)
                        continue
                    self._lose(group.group_id, error)
                break

    async def _end(self, group: ScoredGroup) -> None:
        end = EndGroupRequest(
            group_id=group.group_id,
            task_id=group.task_id or "",
            rewards=group.rewards,
            served=group.served_index,
            parent_id=group.parent_id,
            metadata={"question": group.question},
        )
        reply = await self._link.end_group(end)
        state = "pooled" if reply.pooled else "dropped"
        self._ledger.settle(
            group.group_id,
            state if reply.success else "lost",
            reply.failure_reason or None,
            reply.step,
            reply.calls,
        )

    def _lose(self, group_id: str, error: Exception) -> None:
        log.warning("group %s could not be ended: the swarm server %s", group_id, mend_of(error))
        self._ledger.settle(group_id, "lost", _reason(error), None, [])

    async def _abandon(self, record: GroupRecord) -> None:
        self._ledger.record(record)
        await self._link.abort_group(record.group_id)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a group could not be settled", exc_info=task.exception())


def _scored(record: GroupRecord) -> ScoredGroup:
    rewards = [sibling.reward for sibling in record.siblings]
    what = record.group_id, record.task_id, record.question
    return ScoredGroup(*what, rewards, record.served_index, record.parent_id)


def _reason(error: Exception) -> str:
    """
    >>> _reason(TimeoutError())
    'swarm_unreachable'
    """
    if is_passing(error):
        return "swarm_unreachable"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"swarm_refused: {error.status}"
    return f"end_failed: {type(error).__name__}"
