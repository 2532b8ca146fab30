"""Ask the server to delete the captured calls of forgotten (deleted) groups. The ledger records the
groups whose calls the server has not deleted yet. For these groups, the request is repeated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from fakevllm.errors import LedgerError
from fakevllm.ledger.edit_rows import edit_name
from fakevllm.ledger.feedback_rows import sample_name
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.forgetting import (
    MAX_GROUPS,
    ForgetGroupsReply,
    ForgetGroupsRequest,
)
from fakevllm_runtime.piece_ranges import in_batches

log = logging.getLogger("fakevllm.forgetting")

GROUPS_PER_REQUEST = 200
REPEAT_EVERY_S = 5.0
"""Seconds between two attempts to send what the server has not deleted yet."""

REMEDIES = {
    401: "refuses the key (401): give an admin's key with --swarm-key",
    403: "refuses the key, which is not an admin's: give an admin's key with --swarm-key",
    404: "does not know how to forget: update fakevllm-server",
    503: "waits for the end of a training step",
}
"""What the server does, and the remedy, by the HTTP status of its reply."""


class ServerProblem(Exception):
    """Error for a request that the server did not carry out. The message lacks its subject "the
    server", for example "refuses the key"."""


Send = Callable[[ForgetGroupsRequest], Awaitable[ForgetGroupsReply]]
"""A function that sends a request to the server. It raises ServerProblem."""
FindRun = Callable[[], Awaitable[str]]
"""A function that returns the id of the server's current run. It raises ServerProblem."""


@dataclass(slots=True)
class Deleted:
    """The result of requests to delete the calls of forgotten groups."""

    num_calls: int = 0
    num_dropped: int = 0
    checkpoint_steps: list[int] = field(default_factory=list[int])
    versions: set[tuple[str | None, int]] = field(default_factory=set[tuple[str | None, int]])
    """Versions that were trained on the groups, with the ids of their runs."""
    sample_folders: set[str] = field(default_factory=set[str])
    """Folders of the server whose tables of sampled answers may still show texts of the groups."""
    problem: str = ""
    """Reason why the server has not deleted everything; empty if it has."""
    num_left: int = 0
    """Number of groups that the server has not deleted."""


class ServerRequests:
    """Asks one server to delete the calls of the groups that were forgotten in one ledger."""

    def __init__(self, ledger: Ledger, send: Send, find_run: FindRun) -> None:
        self._ledger = ledger
        self._send = send
        self._find_run = find_run
        self._lock = asyncio.Lock()
        self.problem = ""
        """Reason why the last repeated attempt failed; empty if it did not."""

    async def send_unsent(self, among: Sequence[str] | None = None) -> Deleted:
        """Ask the server to delete the calls of forgotten groups that are not deleted yet. `among`
        has the ids of the groups to consider; None means all. If the server fails, the result has
        the reason, and the remaining groups are sent later. Only groups of the server's current run
        are sent."""
        deleted = Deleted()
        async with self._lock:
            try:
                await self._send_all(deleted, among)
            except ServerProblem as problem:
                deleted.problem = str(problem)
            deleted.num_left = await asyncio.to_thread(self._ledger.forgotten.num_unsent, among)
        if deleted.num_left and not deleted.problem:
            deleted.problem = "has another run open"
        return deleted

    async def run(self) -> None:
        """Repeat `send_unsent` at intervals, until this task is cancelled."""
        while True:
            try:
                if await asyncio.to_thread(self._ledger.forgotten.num_unsent):
                    self._report(await self.send_unsent())
            except Exception as error:  # isolates: the next attempt may succeed
                self._report(Deleted(problem=f"could not be asked ({error})"))
            await asyncio.sleep(REPEAT_EVERY_S)

    def _report(self, deleted: Deleted) -> None:
        """Log the number of deleted calls. Log a problem only if it is new."""
        if deleted.num_calls or deleted.num_dropped:
            log.info("the server deleted %d calls of forgotten groups", deleted.num_calls)
        if deleted.sample_folders:
            log.warning(
                "tables of samples may still show texts of forgotten groups, in %s",
                ", ".join(sorted(deleted.sample_folders)),
            )
        if deleted.problem and deleted.problem != self.problem:
            log.warning(
                "calls of forgotten groups are still in the journal: the server %s; trying again",
                deleted.problem,
            )
        self.problem = deleted.problem

    async def _send_all(self, deleted: Deleted, among: Sequence[str] | None) -> None:
        rows = self._ledger.forgotten
        if not await asyncio.to_thread(rows.num_unsent, among):
            return
        run_id = await self._find_run()
        while ids := await asyncio.to_thread(rows.unsent, run_id, GROUPS_PER_REQUEST, among):
            feedback = await asyncio.to_thread(rows.feedback_ids, ids)
            samples = [name(*one) for one in feedback for name in (sample_name, edit_name)]
            names = [*ids, *samples]
            for some in in_batches(names, MAX_GROUPS):
                reply = await self._send(ForgetGroupsRequest(run_id=run_id, group_ids=list(some)))
                if not reply.success:
                    raise ServerProblem(f"refused ({reply.failure_reason})")
                deleted.num_calls += reply.num_calls
                deleted.num_dropped += reply.num_dropped
                deleted.sample_folders |= set(reply.sample_folders)
                deleted.versions |= {(run_id, version) for version in reply.versions}
                if reply.checkpoint_step is not None:
                    deleted.checkpoint_steps.append(reply.checkpoint_step)
            if not await self._ledger.is_written(rows.mark_sent(ids)):
                raise LedgerError("The ledger cannot be written: run the command again.")
