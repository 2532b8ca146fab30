"""Forget groups (requests with their answers): delete their captured calls from memory and from the
journal, which is the server's database.

Groups that wait to be trained are dropped. Groups that were trained after the newest checkpoint
would be trained again after a crash, so a checkpoint is saved first. All of this happens between
two training steps, so that no running step uses the groups.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from fakevllm_adapters.protocol.forgetting import ForgetGroupsReply, ForgetGroupsRequest
from fakevllm_runtime.piece_ranges import in_batches
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.journal import forgotten_calls, reads
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.log import RunLog
from fakevllm_server.training.release_service import (
    BetweenSteps,
    ReleaseRefused,
    TrainingControl,
)
from fakevllm_server.training.submission_intake import Intake
from fakevllm_server.types.backend import ActionFailed

log = logging.getLogger("fakevllm.server")

REPLY_WITHIN_S = 60.0
"""Seconds after which a request is refused with 503, because it still waits for the end of a
training step. The groups are forgotten all the same."""
TRUNCATE_WITHIN_S = 10.0
"""Maximum seconds for which other readers of the journal are waited for, so that its write-ahead
log can be truncated."""
PIECES_PER_CHANGE = 100
"""Number of pieces that one change of the journal examines. Acknowledgements wait for the change,
which decompresses the pieces."""


class ForgettingPending(Exception):
    """Error for groups that cannot be forgotten yet. The client should send the request again
    later."""


class ForgetService:
    """Forgets groups (requests with their sampled answers) of one run."""

    def __init__(
        self,
        journal: Journal,
        runlog: RunLog,
        intake: Intake,
        engine: EngineLifecycle,
        between_steps: BetweenSteps,
        has_planned: Callable[[], bool],
        run_id: str,
    ) -> None:
        """Create the service. `between_steps` runs an action between two training steps.
        `has_planned` returns True if a failed step waits to be tried again."""
        self._journal = journal
        self._log = runlog
        self._intake = intake
        self._engine = engine
        self._between_steps = between_steps
        self._has_planned = has_planned
        self._run_id = run_id
        self._erasing = asyncio.Lock()
        self._running: set[asyncio.Task[ForgetGroupsReply]] = set()

    async def forget(self, request: ForgetGroupsRequest) -> ForgetGroupsReply:
        """Forget the groups that the request names, and return the reply to the request.

        A successful reply means that no byte of the groups' calls is left in the journal's files.
        The journal is the server's database. Raises ForgettingPending if the groups cannot be
        forgotten within REPLY_WITHIN_S seconds. Raises BackendError if an engine fails.
        """
        if request.run_id not in (None, self._run_id):
            reason = f"the groups belong to the run {request.run_id}, which is not the current run"
            return ForgetGroupsReply(success=False, failure_reason=reason)
        group_ids = list(dict.fromkeys(request.group_ids))

        async def act(control: TrainingControl | None) -> ForgetGroupsReply:
            return await self._forget(group_ids, control)

        task = asyncio.ensure_future(self._between_steps(act))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A client that disconnects does not end the work.
        done, _ = await asyncio.wait({task}, timeout=REPLY_WITHIN_S)
        if not done or task.cancelled():
            raise ForgettingPending
        try:
            reply = task.result()
        except ReleaseRefused as refused:
            return ForgetGroupsReply(success=False, failure_reason=str(refused))
        await self._erase_unused_bytes()
        if not await asyncio.to_thread(self._journal.truncate_log, TRUNCATE_WITHIN_S):
            reason = "another process reads the journal, so its write-ahead log cannot be truncated"
            return reply.model_copy(update={"success": False, "failure_reason": reason})
        return reply

    async def close(self) -> None:
        """Cancel the requests to forget groups that still wait. Clients send these requests again
        to the next server process."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _forget(
        self, group_ids: Sequence[str], control: TrainingControl | None
    ) -> ForgetGroupsReply:
        await self._journal.wait_written(self._journal.put(), None)
        trained_step, is_planned = self._journal.read(forgotten_calls.last_batched_step, group_ids)
        if is_planned and self._has_planned():
            raise ForgettingPending
        num_calls = self._journal.read(forgotten_calls.num_calls, group_ids)
        saved_step = None
        if control is not None and trained_step > self._last_checkpoint():
            saved_step = await self._save(control)
        self._journal.put(forgotten_calls.calls_forgotten(group_ids))
        dropped = self._intake.pool.forget(group_ids)
        self._log.record_drops(self._engine.global_step, dropped)
        await self._journal.wait_written(self._journal.put(), None)
        log.info("forgotten groups: %d, their calls: %d", len(group_ids), num_calls)
        return ForgetGroupsReply(
            success=True,
            num_calls=num_calls,
            num_dropped=len(dropped),
            checkpoint_step=saved_step,
            versions=self._journal.read(forgotten_calls.trained_versions, group_ids),
        )

    async def _erase_unused_bytes(self) -> None:
        """Overwrite the bytes of shared pieces (parts of prompts) that no prompt uses any more."""
        async with self._erasing:  # each erasure needs ranges that no other erasure has changed
            pieces = self._journal.read(forgotten_calls.loose_pieces)
            used = await asyncio.to_thread(forgotten_calls.used_ranges, self._journal, pieces)
            for some in [*in_batches(pieces, PIECES_PER_CHANGE)] or [[]]:
                change = forgotten_calls.unused_bytes_erased(some, used)
                await self._journal.wait_written(self._journal.put(change), None)

    async def _save(self, control: TrainingControl) -> int:
        try:
            await control.save_newest()
        except (OSError, ActionFailed) as failure:
            raise ReleaseRefused(
                f"the checkpoint that must be saved first cannot be saved ({failure})"
            ) from None
        return self._last_checkpoint()

    def _last_checkpoint(self) -> int:
        return max((saved.step for saved in self._journal.read(reads.checkpoints)), default=0)
