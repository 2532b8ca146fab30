"""Make decisions about versions of the weights. The service checks a request, changes training if
the decision requires a change, records the decision in the journal, and acknowledges the request.

Decisions are made one after another. A decision that changes the trainer or needs a checkpoint is
carried out by the training loop, between two training steps. While no engine runs, a decision
changes only the journal. Training then follows the decision when an engine is started again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import BaseModel

from fakevllm_adapters.protocol.releases import (
    AUTOMATIC,
    Decision,
    ReleaseRecord,
    ReleaseReply,
    ReleaseRequest,
    RollbackRequest,
    TrainingLimitRequest,
)
from fakevllm_adapters.protocol.swarm import SuccessReply
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.journal import reads
from fakevllm_server.journal.rows import ReleaseRow, SavedCheckpoint, TrainingReturn
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.log import RunLog
from fakevllm_server.run.release_history import rejected_by
from fakevllm_server.run.releases import Releases
from fakevllm_server.run.version_lineage import MODEL
from fakevllm_server.types.backend import ActionFailed, BackendError

OPERATOR = "operator"
"""Value of `decided_by` for an operator without a name: the operator's key has no name, or the
server needs no key."""
REPLY_WITHIN_S = 60.0
"""Seconds after which a request is refused with 503, because its decision still waits for the end
of a training step. The decision is carried out all the same. If the client sends the same request
again after that, it gets the result of the decision."""


class DecisionPending(Exception):
    """Error for a request to make a decision about a version, if the decision has not been carried
    out yet. If the client sends the request again later, it gets the result."""


class ReleaseRefused(Exception):
    """Error for a request whose decision about a version cannot be made. The message contains the
    reason and the remedy."""


@dataclass(frozen=True, slots=True)
class ReturnTarget:
    """The weights from which training continues after a return to an earlier version."""

    version: int
    step: int
    folder: Path | None
    """Folder of the checkpoint with these weights. Its files were checked, and are complete. None
    for the model itself, which has no checkpoint."""


class TrainingControl(Protocol):
    """The operations of training that a decision about a version may need: save a checkpoint, and
    go back to an earlier version. Both run between two training steps."""

    async def save_newest(self) -> None:
        """Save a checkpoint of the newest weights, if these weights have no checkpoint yet. Raise
        OSError or BackendError if the weights cannot be saved."""
        ...

    async def go_back(self, target: ReturnTarget, record: Callable[[], Awaitable[None]]) -> None:
        """Continue training from the earlier weights `target`. `record` records this change in the
        journal (the server's SQLite file).

        Raise ActionFailed if the trainer does not accept the weights. Raise another BackendError if
        the trainer fails. If the error comes before the call of `record`, training continues from
        the newest weights.
        """
        ...


Result = TypeVar("Result")
Action = Callable[[TrainingControl | None], Awaitable[Result]]
"""An action that is run between two training steps. The argument is None if no engine runs."""


class BetweenSteps(Protocol):
    """A function that runs an action between two training steps, and returns its result."""

    async def __call__(self, action: Action[Result], /) -> Result: ...


class ReleaseService:
    """The service that makes the decisions about the versions of one run."""

    def __init__(
        self,
        journal: Journal,
        runlog: RunLog,
        releases: Releases,
        folders: CheckpointFolders,
        between_steps: BetweenSteps,
        clock: Callable[[], float] = time.time,
        run_id: str | None = None,
    ) -> None:
        """Create the service. `between_steps` is a function that runs an action between two
        training steps, and passes a TrainingControl to the action. If no engine runs,
        `between_steps` passes None instead, and no engine is started while the action runs.
        `run_id` is the id of the run. Requests for another run are refused."""
        self._run_id = run_id
        self._journal = journal
        self._log = runlog
        self._releases = releases
        self._folders = folders
        self._between_steps = between_steps
        self._clock = clock
        self._lock = asyncio.Lock()
        """Lock that is held while a decision is made, and not while the decision waits for the
        training loop."""
        self._running: dict[str, tuple[bytes, asyncio.Task[ReleaseRecord]]] = {}
        """Request hash and task of each decision that is being made, by the id of the request."""

    async def decide(self, request: ReleaseRequest, decided_by: str) -> ReleaseReply:
        """Carry out a decision about a version, and return the reply to the client. A reply of
        success is returned only after the decision is on disk. Raise IdempotencyConflict if a
        different request had the same id. Raise DecisionPending if the decision still waits for the
        end of a training step after REPLY_WITHIN_S seconds. Raise BackendError if an engine
        fails."""

        async def make(control: TrainingControl | None) -> ReleaseRow:
            async with self._making(request) as known:
                return known or await self._decide(request, decided_by, control)

        if request.decision in (Decision.HOLD, Decision.RESUME, Decision.UNDECIDED):
            return await self._once("release", request, lambda: make(None))
        return await self._once("release", request, lambda: self._between_steps(make))

    async def roll_back(self, request: RollbackRequest, decided_by: str) -> ReleaseReply:
        """Let training go back to an earlier version, and return the reply to the client. A reply
        of success is returned only after the decision is on disk. Raise the same errors as
        `decide`."""

        async def make(control: TrainingControl | None) -> ReleaseRow:
            async with self._making(request) as known:
                return known or await self._roll_back(request, decided_by, control)

        return await self._once("rollback", request, lambda: self._between_steps(make))

    async def limit_training(self, request: TrainingLimitRequest) -> SuccessReply:
        """Set or remove the training limit (the newest version that training may make). Return the
        reply to the client after the limit is on disk. The caller must then wake the training loop,
        so that it sees the limit. Raise JournalError if the journal cannot be written."""
        refusal = self._other_run("limit", "send the limit", request.run_id)
        if refusal is not None:
            return SuccessReply(success=False, failure_reason=refusal)
        await self._releases.limit_training(request.version)
        return SuccessReply(success=True)

    def _other_run(self, subject: str, remedy: str, run_id: str | None) -> str | None:
        """If a request is about another run than the current run, return the reason why the request
        is refused. Otherwise return None."""
        if run_id in (None, self._run_id):
            return None
        return (
            f"The {subject} is about the run {run_id}, and this server has the run {self._run_id} "
            f"now: read its history with GET /releases, and {remedy} again."
        )

    async def close(self) -> None:
        """Cancel the decisions that are not carried out yet. Clients may send the requests for
        these decisions again to the next server process."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def _making(
        self, request: ReleaseRequest | RollbackRequest
    ) -> AsyncGenerator[ReleaseRow | None]:
        """Make sure that no other decision is made during the `with` block. Yield the decision on
        `request` if it has already been made, else None. The decision may already exist, because
        the whole attempt is repeated if the training loop ends during an attempt."""
        async with self._lock:
            await self._journal.wait_written(self._journal.put())
            yield self._releases.find(request.id)

    async def _once(
        self,
        kind: str,
        request: ReleaseRequest | RollbackRequest,
        make: Callable[[], Awaitable[ReleaseRow]],
    ) -> ReleaseReply:
        refusal = self._other_run("decision", "decide", request.run_id)
        if refusal is not None:
            return ReleaseReply(success=False, failure_reason=refusal)
        request_hash = _hash_of(kind, request)
        known = self._releases.find(request.id)
        if known is not None:
            if known.request_hash != request_hash:
                raise IdempotencyConflict
            await self._journal.wait_written(self._journal.put())
            return ReleaseReply(success=True, record=known.record)
        running = self._running.get(request.id)
        if running is None:

            async def run() -> ReleaseRecord:
                try:
                    return (await make()).record
                finally:
                    del self._running[request.id]

            running = request_hash, asyncio.create_task(run())
            # A client that has disconnected does not read the error.
            running[1].add_done_callback(lambda task: task.cancelled() or task.exception())
            self._running[request.id] = running
        if running[0] != request_hash:
            raise IdempotencyConflict
        # A client that disconnects does not end a decision that is being carried out.
        done, _ = await asyncio.wait({running[1]}, timeout=REPLY_WITHIN_S)
        if not done or running[1].cancelled():
            raise DecisionPending
        try:
            record = running[1].result()
        except ReleaseRefused as refused:
            return ReleaseReply(success=False, failure_reason=str(refused))
        return ReleaseReply(success=True, record=record)

    async def _decide(
        self, request: ReleaseRequest, decided_by: str, control: TrainingControl | None
    ) -> ReleaseRow:
        decision, version = request.decision, request.version
        if decision in (Decision.HOLD, Decision.RESUME):
            row = self._row("release", request, decision, None, decided_by)
        elif decision in (Decision.CANDIDATE, Decision.RELEASED):
            self._refuse_held()
            version = await self._version_with_checkpoint(request, control)
            row = self._row("release", request, decision, version, decided_by)
        elif version is None:
            raise ReleaseRefused(f"Name the version that is {decision}.")
        else:
            self._check_known(version)
            if decision is Decision.REJECTED:
                version = self._version_to_reject(version)
            row = self._row("release", request, decision, version, decided_by)
        if decision is Decision.REJECTED:
            return await self._reject(row, control)
        await self._releases.record(row)
        return row

    def _refuse_held(self) -> None:
        if self._releases.state.is_held:
            raise ReleaseRefused(
                "Releases are on hold, so no version becomes a candidate and none is released: "
                "run `fakevllm release resume`, or send the decision `resume`, first."
            )

    async def _version_with_checkpoint(
        self, request: ReleaseRequest, control: TrainingControl | None
    ) -> int:
        """Return the version for a decision that requires a checkpoint. If the decision is about
        the newest version and this version has no checkpoint, save a checkpoint now."""
        version = request.version
        if version is None and request.decision is not Decision.CANDIDATE:
            raise ReleaseRefused(f"Name the version that is {request.decision}.")
        if version is not None:
            self._check_known(version)
        if version in self._releases.state.rejected and not request.force:
            raise ReleaseRefused(
                f"Version {version} was rejected: name another version, or send `force` "
                "(`fakevllm release promote --force`)."
            )
        newest = self._releases.lineage().newest
        if version in (None, newest) and newest != MODEL and control is not None:
            try:
                await control.save_newest()
            except (OSError, ActionFailed) as failure:
                raise ReleaseRefused(
                    f"Version {newest} could not be saved, so it cannot be {request.decision}: "
                    f"{failure}. Send the request again when this is mended."
                ) from None
        if version is None:
            version = self._newest_saved()
        elif version != MODEL and version not in self._saved():
            raise ReleaseRefused(
                f"Version {version} has no checkpoint (any more). These versions have one: "
                f"{self._choices()}."
            )
        return version

    def _newest_saved(self) -> int:
        """Return the version of the checkpoint that contains the newest weights. The caller makes
        this version the candidate (the version that is evaluated next)."""
        saved = self._journal.read(reads.checkpoints)
        step = self._log.last_step
        version = next((one.version for one in saved if one.step == step), MODEL)
        if step == 0:
            raise ReleaseRefused(
                "The newest weights are those of the model itself: wait for the next training step."
            )
        if version == self._releases.state.released:
            raise ReleaseRefused(
                f"The newest weights are those of version {version}, which is released already: "
                "wait for the next training step."
            )
        if version == MODEL:
            raise ReleaseRefused(
                f"The newest weights, of step {step}, have no checkpoint: start the engine, and "
                "send the request again."
            )
        return version

    def _version_to_reject(self, version: int) -> int:
        """Return the version that is rejected after a request to reject `version`.

        The result is usually `version` itself. There is one exception. If training has restored the
        released weights, `version` may be a copy of the released version. The result is then the
        next version on the training path that is not such a copy.
        """
        lineage, released = self._releases.lineage(), self._releases.state.released
        twins = lineage.twins_of(released)
        if version != released and version in twins:
            first = lineage.first_after(version, twins)
            if first is None:
                raise ReleaseRefused(
                    f"Version {version} has the weights of version {released}, which is released: "
                    "there is nothing to go back from."
                )
            return first
        if lineage.step_of(version) == 0:
            raise ReleaseRefused(
                f"Version {version} is the model itself, which cannot be rejected."
            )
        return version

    async def _reject(self, row: ReleaseRow, control: TrainingControl | None) -> ReleaseRow:
        """Record a rejection. If the newest version is one of the rejected versions, let training
        go back to the version that answers apps after the rejection."""
        lineage = self._releases.lineage()
        rejected = rejected_by(row, lineage)
        # An undone version would come back under another number.
        if rejected.isdisjoint({lineage.newest, *lineage.undone}):
            await self._releases.record(row)
            return row
        target = lineage.on_path(self._releases.state.released_without(rejected))
        return await self._go_back(_with_restored(row, target), control)

    async def _roll_back(
        self, request: RollbackRequest, decided_by: str, control: TrainingControl | None
    ) -> ReleaseRow:
        version = self._releases.state.released if request.version is None else request.version
        self._check_known(version)
        if version in self._releases.state.rejected:
            raise ReleaseRefused(
                f"Version {version} was rejected: name another version, or release it before, with "
                "`force` (`fakevllm release promote --force`)."
            )
        lineage = self._releases.lineage()
        path, twins = lineage.path, lineage.twins_of(version)
        if path[-1] in twins and not lineage.undone:
            raise ReleaseRefused(
                f"The newest weights are those of version {version}: there is nothing to go back "
                "from."
            )
        version = lineage.on_path(version)
        # Versions that training leaves for one that it had left before do not descend from it.
        first = lineage.first_after(version, twins)
        row = self._row("rollback", request, Decision.REJECTED, first, decided_by)
        row = _with_restored(row, version, is_rollback=True)
        return await self._go_back(row, control)

    async def _go_back(self, row: ReleaseRow, control: TrainingControl | None) -> ReleaseRow:
        assert row.restored is not None, "the caller chooses the version to go back to"
        target = await self._find_target(row.restored)
        back = self._return_to(target, row)

        async def record() -> None:
            await self._releases.record_return(row, back)

        if control is None:
            await record()
            return row
        try:
            await control.go_back(target, record)
        except ActionFailed as failure:
            if self._releases.find(row.record.id) is not None:
                # The weights are restored, but not served yet: the engines are started again.
                raise BackendError(f"the restored weights could not be served: {failure}") from None
            raise ReleaseRefused(
                f"Version {target.version} could not be restored, and training goes on with the "
                f"newest weights: {failure}."
            ) from None
        return row

    def _return_to(self, target: ReturnTarget, row: ReleaseRow) -> TrainingReturn:
        """Build the journal's record that training returns to `target`. The record lists the
        versions whose checkpoints are kept.

        A version is pinned if its checkpoint must be kept. The list has all versions that are
        pinned before or after the decision `row`. It also has the version that the decision
        rejects, because an operator may still release this version by force.
        """
        kept = self._releases.state.pinned | self._releases.pinned_after(row)
        if row.record.version is not None and not row.is_rollback:
            kept.add(row.record.version)
        lineage = self._releases.lineage()
        common_step = lineage.step_of(lineage.common_version(target.version))
        return TrainingReturn(target.step, common_step, target.version, kept)

    async def _find_target(self, version: int) -> ReturnTarget:
        lineage = self._releases.lineage()
        if lineage.step_of(version) == 0:
            return ReturnTarget(version, 0, None)
        saved = self._saved().get(version)
        if saved is None and version in lineage.path:
            # A restored version has the weights of the checkpoint of the same step.
            known = self._journal.read(reads.checkpoints)
            step = lineage.step_of(version)
            saved = next((one for one in known if one.step == step), None)
        if saved is None:
            raise ReleaseRefused(
                f"Training cannot go back to version {version}, which has no checkpoint (any "
                f"more). Send a rollback to one of these versions: {self._choices()}."
            )
        try:
            folder = await asyncio.to_thread(self._folders.find, saved)
        except OSError as error:
            raise ReleaseRefused(
                f"Training cannot go back to version {version} ({error}): repair the files, or "
                f"send a rollback to another of these versions: {self._choices()}."
            ) from None
        return ReturnTarget(version, saved.step, folder.resolve())

    def _check_known(self, version: int) -> None:
        if version not in self._releases.lineage():
            newest = self._log.version
            raise ReleaseRefused(f"Version {version} does not exist: the newest is {newest}.")

    def _saved(self) -> dict[int, SavedCheckpoint]:
        """Return the saved checkpoints by version. The oldest version comes first."""
        known = self._journal.read(reads.checkpoints) + self._journal.read(reads.side_checkpoints)
        return {saved.version: saved for saved in sorted(known, key=lambda one: one.version)}

    def versions_with_weights(self) -> list[int]:
        """Return the versions whose weights the server has, ascending: the model itself, and the
        versions with a checkpoint."""
        return sorted({MODEL, *self._saved()})

    def _choices(self) -> str:
        """Return a text for an error message. The text lists the versions whose weights are
        available."""
        return ", ".join(map(str, self.versions_with_weights()))

    def _row(
        self,
        kind: str,
        request: ReleaseRequest | RollbackRequest,
        decision: Decision,
        version: int | None,
        decided_by: str,
    ) -> ReleaseRow:
        lineage = self._releases.lineage()
        record = ReleaseRecord(
            number=self._releases.num_records + 1,
            id=request.id,
            decision=decision,
            version=version,
            parent=None if version is None else lineage.parent_of(version),
            time_s=self._clock(),
            decided_by=_automatic(request.id) or decided_by or OPERATOR,
            evidence=request.evidence,
        )
        pinned = request.pinned if isinstance(request, ReleaseRequest) else None
        return ReleaseRow(record, _hash_of(kind, request), self._log.version, pinned=pinned)


def _automatic(request_id: str) -> str | None:
    """Return GATE or GUARD if the id of a request says that one of them makes the decision. Return
    None for a decision of an operator."""
    return next((name for name in AUTOMATIC if request_id.startswith(f"{name}-")), None)


def _with_restored(row: ReleaseRow, version: int, *, is_rollback: bool = False) -> ReleaseRow:
    """Return a copy of the decision `row`, with a return of training to `version` added. Clients
    can read `version` in the evidence of the copy."""
    evidence = row.record.evidence | {"restored": version}
    record = row.record.model_copy(update={"evidence": evidence})
    return ReleaseRow(record, row.request_hash, row.newest, version, is_rollback, row.pinned)


def _hash_of(kind: str, request: BaseModel) -> bytes:
    # Without defaults, so that the hash stays the same when a later version adds a field.
    body = f"{kind} {request.model_dump_json(exclude_defaults=True, exclude={'run_id'})}"
    return hashlib.blake2b(body.encode(), digest_size=16).digest()
