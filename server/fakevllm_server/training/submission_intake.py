"""Accept calls, groups, episodes, feedback samples and users' edits from clients.

Each request is handled in three steps. It is decided in memory, written to the journal (the
server's SQLite file), and then acknowledged. Requests are accepted in every state of the engine,
even while a training step runs. The time at which a call arrives does not matter for training. Only
the age of the weights that sampled the call matters.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.batch_status import ThrottlePolicy
from fakevllm_adapters.protocol.run_finished import describe_closed_run
from fakevllm_adapters.protocol.swarm import (
    AddDemonstrationRequest,
    AddLoggedGroupReply,
    AddLoggedGroupRequest,
    AddSampleRequest,
    EndEpisodeReply,
    EndEpisodeRequest,
    EndGroupReply,
    EndGroupRequest,
    SiblingRef,
)
from fakevllm_server.algorithms.staleness import only_one_version
from fakevllm_server.episodes.claim_limits import Participation
from fakevllm_server.episodes.ended_group_ids import MAX_REMEMBERED
from fakevllm_server.episodes.episode_registry import Episode, EpisodeRegistry, Idempotency
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.episodes.incomplete_tasks import CompletedTask
from fakevllm_server.episodes.job_identity import OTHER_JOB, JobIdentity
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.journal import reads, row_changes
from fakevllm_server.journal.group_commit_writer import Change, JournalError
from fakevllm_server.journal.rows import PooledGroup, ScoredSample, pooled_or_dropped
from fakevllm_server.journal.store import DISTRUSTED_VERSIONS, GROUPS_OF_OTHER_RUNS, Journal
from fakevllm_server.journal.tables import GroupState
from fakevllm_server.run.log import RunLog
from fakevllm_server.training.durable_acknowledgement import Acknowledger, Decision
from fakevllm_server.types.calls import RecordedCall, with_prompts_apart
from fakevllm_server.types.edit_demonstrations import edit_episodes

CALL_LIMIT_S = 2.0
"""Maximum number of seconds that the end of an answer is delayed until its call is on disk. Apps do
not notice so short a delay."""


class Intake:
    """Owns the episodes and the pool of groups of one run. Every change of the episodes or the pool
    is written to the journal (the run's SQLite file)."""

    def __init__(
        self,
        journal: Journal,
        runlog: RunLog,
        engine: EngineLifecycle,
        rejected: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        """Create an intake without a job. `rejected` is a function that returns the rejected
        versions of the weights. Groups that were sampled by a rejected version are not trained."""
        self._rejected = rejected
        self._journal = journal
        self._log = runlog
        self._engine = engine
        self._acknowledger = Acknowledger(journal)
        self.episodes = EpisodeRegistry()
        self._groups_of_other_runs: dict[str, None] = dict.fromkeys(
            json.loads(journal.read(reads.meta, GROUPS_OF_OTHER_RUNS) or "[]")
        )
        """Ids of the groups that were begun in other runs, oldest first."""
        self._distrusted: set[int] = set(
            json.loads(journal.read(reads.meta, DISTRUSTED_VERSIONS) or "[]")
        )
        """Versions under whose number the engine had other weights."""
        self.pool = self._new_pool(None)
        self._async_steps = 0
        """The setting of the job for which groups are collected."""
        self.job_hash = ""
        """Digest of the job for which groups are collected; empty before the first job, and for a
        job that an older server started."""
        self.participation = Participation(self.pool, engine)

    def resume(self, job: TrainJob | None, now: float, identity: JobIdentity | None = None) -> None:
        """Restore the episodes and the pool of groups from the journal, for training by `job`.
        `identity` is the identity of the job, or None if it is unknown.

        This method is called when the server starts and when an engine starts. No request is in
        progress at these times.
        """
        pending = self._journal.read(reads.pending_work, now)
        self.job_hash = "" if identity is None else identity.digest
        self.episodes = EpisodeRegistry()
        self.episodes.reopen(pending.open_episodes)
        for episode in pending.claimed:
            self.episodes.restore(episode)
        self.pool = self._new_pool(job)
        self._async_steps = 0 if job is None else job.async_steps
        self.pool.clients.restore(self._journal.read(reads.waiting_clients))
        self.participation = Participation(self.pool, self._engine)
        dropped = self.pool.restore(pending.groups, pending.open_groups, now)
        dropped |= dict.fromkeys(pending.corrupt, reads.CORRUPT)
        dropped |= self._give_up_corrupt(pending)
        for sample, calls in pending.samples:
            self._rejoin_task(sample, calls)
        self._log.record_drops(self._log.last_step + 1, dropped)

    @property
    def known_groups(self) -> list[str]:
        """Ids of the groups that the server knows. These are groups that were begun in other runs,
        groups that ended since the engine's start, and open groups. At most MAX_REMEMBERED ids are
        returned. The open groups come last."""
        known = dict.fromkeys([*self._groups_of_other_runs, *self.pool.known_groups])
        return list(known)[-MAX_REMEMBERED:]

    def refuse_groups(self, group_ids: Sequence[str]) -> None:
        """Refuse these groups from now on, even after a restart, because they were begun in another
        run. A group that is open in this run can still be completed.

        A proxy may complete a group after the run has changed. Without the refusal, answers of two
        models would be trained as one group.
        """
        self._groups_of_other_runs = dict.fromkeys(group_ids)
        value = json.dumps(list(group_ids))
        self._journal.put(row_changes.meta_set(GROUPS_OF_OTHER_RUNS, value))

    async def distrust(self, version: int) -> None:
        """Drop all groups that this version sampled. This includes future groups, even after a
        restart. Call this method if the engine had other weights under this version number."""
        self._distrusted.add(version)
        self.pool.drop_distrusted()
        value = json.dumps(sorted(self._distrusted))
        await self._journal.write(row_changes.meta_set(DISTRUSTED_VERSIONS, value))

    def drop_waiting(self, reason: str) -> int:
        """Drop all groups and samples that wait to be trained. Reopen every claimed episode for
        other clients. Return the number of dropped groups. In this number, each ended episode of an
        incomplete task counts as one group.

        Call this method while no engine runs, before another job is started. The caller must flush
        the journal before and after the call, and then call `resume`.
        """
        pending = self._journal.read(reads.pending_work, time.monotonic())
        if claims := pending.claimed + pending.corrupt_claims:
            self._journal.put(row_changes.reopened(claims))
        samples = [sample for sample, _ in pending.samples] + pending.corrupt_samples
        names = [
            *(group.group_id for group in pending.groups),
            *pending.corrupt,
            *pending.open_groups,
            *self._drop_samples(samples, reason),
            *self._log.unplan_batches(),
        ]
        self._log.discard_client_metrics()
        self._log.record_drops(self._log.last_step + 1, dict.fromkeys(names, reason))
        return len(names)

    # --- episodes

    async def claim(
        self,
        client_uuid: str,
        kind: str,
        idle_limit_s: float,
        owner: str = "",
        policy: ThrottlePolicy | None = None,
        idempotency: Idempotency | None = None,
    ) -> Episode:
        """Claim an episode for a client. `kind` is "train" or "eval". Raises JournalError if the
        claim cannot be written to the journal."""
        self._journal.check_capacity()
        now = time.monotonic()
        episode = self.episodes.claim(client_uuid, kind, idle_limit_s, now, owner, idempotency)
        self.participation.claimed(episode, policy, now)
        await self._write(row_changes.claimed(episode))
        return episode

    async def renew_claim(
        self,
        client_uuid: str,
        owner: str,
        idempotency: Idempotency,
        policy: ThrottlePolicy | None = None,
    ) -> Episode | None:
        """Return the episode that an identical earlier request has claimed. Return None if there is
        no such claim, or if the claim is no longer valid.

        The time until the claim expires starts again. Raises IdempotencyConflict if the idempotency
        key was used with a different request. Raises JournalError if the journal cannot be written.
        """
        episode = self.episodes.find_claim(client_uuid, owner, idempotency)
        if episode is None:
            return None
        now = time.monotonic()
        self.episodes.renew(episode, now)
        self.participation.clients.touch(client_uuid, now)
        if not episode.task_id:  # from an earlier process: the journal does not record the policy
            self.participation.claimed(episode, policy, now)
        await self._write()
        return episode

    async def end_episode(
        self, request: EndEpisodeRequest, reward: float, closed_reason: str | None
    ) -> EndEpisodeReply:
        """End an episode with its reward. If this was the last missing episode of its task, the
        episodes of the task become a group.

        `closed_reason` is the reason why training has ended, or None while training continues.
        Raises EpisodeRefused if the client has not claimed the episode. Raises IdempotencyConflict
        if a different request has ended the episode before. Raises JournalError if the end cannot
        be written to the journal.
        """

        def decide() -> Decision[EndEpisodeReply]:
            episode = self.episodes.end(request.episode_uuid, request.client_uuid)
            task_id = request.task_id if closed_reason is None else None
            is_active = request.declare_client_active
            self.participation.ended(episode, task_id, is_active, time.monotonic())
            sample = ScoredSample(episode.uuid, 0, reward, request.task_id)
            group, members = self._group_of(episode, sample, closed_reason)
            is_eval = episode.kind == "eval"
            entry = self._log.record_evaluation(reward, time.time()) if is_eval else None
            if not is_eval:
                self._log.record_client_metrics(request.workflow_output.log_metrics)
            ended = partial(row_changes.episode_ended, episode.episode_id, sample, group, members)
            reply = EndEpisodeReply(success=True, warning=_warning(episode, closed_reason))
            return reply, partial(ended, evaluated=entry)

        is_new = self.episodes.find(request.episode_uuid) is not None
        key = f"episode:{request.episode_uuid}"
        return await self._acknowledger.once(key, request, EndEpisodeReply, decide, is_new=is_new)

    async def abort_episode(self, uuid: str, client_uuid: str, is_active: bool = True) -> None:
        """Abort the claim of an episode, so that another client may claim it. Raises JournalError
        if the journal cannot be written."""
        episode = self.episodes.abort(uuid, client_uuid)
        if episode is not None:
            self.participation.ended(episode, None, is_active, time.monotonic())
        await self._write(*([] if episode is None else [row_changes.reopened([episode])]))

    def sweep(self, now: float) -> None:
        """Reopen episodes whose claims have expired, and complete tasks that have waited too long
        for missing episodes."""
        idle = self.episodes.sweep(now)
        if idle:
            self._journal.put(row_changes.reopened(idle))
        self.participation.expired(idle, now)
        for completed in self.pool.complete_expired(now):
            self._journal.put(row_changes.task_completed(*_rows_of(completed)))

    def complete_all_tasks(self) -> None:
        """If the job allows training steps with incomplete tasks, complete all tasks that still
        wait for episodes. Call this method before a step."""
        for completed in self.pool.complete_all():
            self._journal.put(row_changes.task_completed(*_rows_of(completed)))

    def reopen_episodes(self) -> None:
        """Reopen every claimed episode for other clients. Call this method when the engine was
        stopped."""
        claimed = self.episodes.give_up()
        if claimed:
            self._journal.put(row_changes.reopened(claimed))

    # --- calls

    async def add_call(self, sibling: SiblingRef, call: RecordedCall) -> None:
        """Record a model call of a sibling (one of the answers to an app's request), as `add_calls`
        does."""
        await self.add_calls([(sibling, call)])

    async def add_calls(self, calls: Sequence[tuple[SiblingRef, RecordedCall]]) -> None:
        """Record one model call for each of several siblings, and wait for the disk once.

        If the journal's queue is full, the calls are ignored and not trained. If the disk is slow,
        this method returns before the calls are on disk, and a crash may then lose them. In both
        cases the app gets its answers.
        """
        changes: list[Change] = []
        for sibling, call in () if self._journal.is_full else calls:
            call = self.pool.with_shared_prompt(sibling.group_id, self._captured(call))
            seq = self.pool.add_call(sibling, call, time.monotonic())
            if seq is not None:
                changes.append(
                    row_changes.call_recorded(sibling.episode_id, seq, call, sibling.group_id)
                )
        if changes:
            await self._write_calls(*changes)

    async def add_episode_call(self, episode: Episode, call: RecordedCall) -> None:
        """Record a model call of an episode. The call is ignored if the episode's claim has ended,
        or if the journal's queue is full."""
        if self.episodes.find(episode.uuid) is not episode or self._journal.is_full:
            return
        episode.calls.append(self._captured(call))
        await self._write_calls(
            row_changes.call_recorded(episode.uuid, len(episode.calls) - 1, episode.calls[-1])
        )

    def _captured(self, call: RecordedCall) -> RecordedCall:
        """Return a call as it is kept for training. A job with `async_steps` trains no call with
        tokens of several versions."""
        return only_one_version(call) if self._async_steps else call

    # --- groups

    async def end_group(self, request: EndGroupRequest, closed_reason: str | None) -> EndGroupReply:
        """End a passive group (the answers to one request of an app) with its rewards.

        Raises IdempotencyConflict if a different request has ended the group before. Raises
        JournalError if the end cannot be written to the journal.
        """

        def decide() -> Decision[EndGroupReply]:
            reply = self.pool.end_group(
                request.group_id,
                request.rewards,
                self._engine.collecting_step,
                closed_reason=closed_reason,
                served=request.served,
                parent_id=request.parent_id,
                hook_hash=request.hook_hash,
            )
            if reply.success:
                reply.job_hash = self.job_hash
            samples = [
                ScoredSample(SiblingRef(request.group_id, index).episode_id, index, reward)
                for index, reward in enumerate(request.rewards)
            ]
            group = pooled_or_dropped(
                request.group_id, reply.failure_reason, hook_hash=request.hook_hash
            )
            return reply, partial(
                row_changes.group_ended, group, samples
            ) if reply.success else None

        reply = await self._acknowledger.once(
            f"group:{request.group_id}", request, EndGroupReply, decide
        )
        return self._with_calls(reply, request)

    async def add_sample(
        self,
        request: AddSampleRequest,
        calls: Sequence[RecordedCall],
        closed_reason: str | None,
    ) -> EndGroupReply:
        """Add a feedback sample (an answer that is trained again because of later feedback) to the
        groups that wait for training. `calls` are the model calls of the sample. The request
        contains the sample's advantage.

        Raises IdempotencyConflict if a different request has added the sample before. Raises
        JournalError if the sample cannot be written to the journal.
        """
        name, advantage = request.sample_id, request.advantage

        def decide() -> Decision[EndGroupReply]:
            step = self._engine.collecting_step
            reply = self.pool.add_sample(name, calls, advantage, step, closed_reason=closed_reason)
            sample = ScoredSample(SiblingRef(name, 0).episode_id, 0, advantage)
            group = pooled_or_dropped(name, reply.failure_reason, advantage)
            change = partial(row_changes.group_ended, group, [sample], calls=[calls])
            return reply, change if reply.success else None

        return await self._acknowledger.once(f"sample:{name}", request, EndGroupReply, decide)

    async def add_demonstration(
        self,
        request: AddDemonstrationRequest,
        loss: str,
        calls: Sequence[RecordedCall],
        closed_reason: str | None,
    ) -> EndGroupReply:
        """Add the demonstrations of a user's edit to the groups that wait for training. `loss` is
        their demonstration loss, and `calls` has one call for each demonstration.

        Raises IdempotencyConflict if a different request has used the same `sample_id` before.
        Raises JournalError if the demonstrations cannot be written to the journal.
        """
        name = request.sample_id

        def decide() -> Decision[EndGroupReply]:
            step = self._engine.collecting_step
            reply = self.pool.add_demonstrations(
                name, loss, calls, step, closed_reason=closed_reason
            )
            samples = [
                ScoredSample(episode.owner, episode.index, None)
                for episode in edit_episodes(name, calls)
            ]
            group = pooled_or_dropped(name, reply.failure_reason, demonstrates=loss)
            change = partial(
                row_changes.group_ended, group, samples, calls=[[one] for one in calls]
            )
            return reply, change if reply.success else None

        return await self._acknowledger.once(
            f"demonstration:{name}", request, EndGroupReply, decide
        )

    async def add_logged_group(
        self,
        request: AddLoggedGroupRequest,
        calls: Sequence[Sequence[RecordedCall]],
        closed_reason: str | None,
    ) -> AddLoggedGroupReply:
        """Add a group of an earlier run to the groups that wait for training. `calls` has the model
        calls of each sibling.

        Raises IdempotencyConflict if a different request has added the group before. Raises
        JournalError if the group cannot be written to the journal.
        """
        group_id, hook_hash = request.group_id, request.hook_hash

        def decide() -> Decision[AddLoggedGroupReply]:
            reply = self.pool.add_logged_group(
                group_id,
                request.rewards,
                calls,
                self._engine.collecting_step,
                closed_reason=closed_reason,
                hook_hash=hook_hash,
            )
            samples = [
                ScoredSample(SiblingRef(group_id, index).episode_id, index, reward)
                for index, reward in enumerate(request.rewards)
            ]
            group = pooled_or_dropped(
                group_id, reply.failure_reason, hook_hash=hook_hash, is_logged=True
            )
            change = partial(row_changes.group_ended, group, samples, calls=calls)
            return reply, change if reply.success else None

        return await self._acknowledger.once(
            f"logged:{group_id}", request, AddLoggedGroupReply, decide
        )

    async def abort_group(self, group_id: str) -> None:
        """Drop a group that has not ended. Raises JournalError if the journal cannot be written."""
        is_new = self.pool.abort_group(group_id)
        await self._write(*([row_changes.group_aborted(group_id)] if is_new else []))

    # --- the journal

    def _new_pool(self, job: TrainJob | None) -> Pool:
        return Pool(job, self._ended_reason, self._rejected, self._distrusted)

    def _ended_reason(self, group_id: str) -> str | None:
        """Return the reason why a group id is refused, or None if the id is new. The id is looked
        up in the journal."""
        is_of_other_run = group_id in self._groups_of_other_runs
        ended_reason = self._journal.look_up(reads.ended_reason, group_id)
        return ended_reason or (OTHER_JOB if is_of_other_run else None)

    def _give_up_corrupt(self, pending: reads.PendingWork) -> dict[str, str]:
        """Give up the claimed episodes and the ended episodes (samples) whose calls are damaged in
        the journal.

        Such a claimed episode can be claimed again, as if its claim had expired. Such a sample is
        dropped if it waits for other samples of its task. Return a dict from the `owner` of each
        dropped sample to the reason.
        """
        claims, samples = pending.corrupt_claims, pending.corrupt_samples
        if claims:
            self.episodes.reopen([(claim.episode_id, claim.epoch) for claim in claims])
            self._journal.put(row_changes.reopened(claims))
        return dict.fromkeys(self._drop_samples(samples, reads.CORRUPT), reads.CORRUPT)

    def _drop_samples(self, samples: Sequence[ScoredSample], reason: str) -> list[str]:
        """Drop samples (ended episodes) whose task is incomplete. The journal records each sample
        as a group of its own, whose id is the sample's `owner`. Return these ids."""
        for sample in samples:
            group = PooledGroup(sample.owner, GroupState.DROPPED, reason)
            self._journal.put(row_changes.task_completed(group, [sample]))
        return [sample.owner for sample in samples]

    def _group_of(
        self, episode: Episode, sample: ScoredSample, closed_reason: str | None
    ) -> tuple[PooledGroup | None, list[ScoredSample]]:
        """Return the group that an ended episode completes, and the samples of this group.

        A training episode is added to its task. While the task lacks episodes, return (None, []).
        An evaluation, or an episode after the end of training, is a group by itself.
        """
        if episode.kind == "eval":
            return PooledGroup(episode.uuid, GroupState.EVAL), [sample]
        if closed_reason is not None:
            self._log.record_drops(self._engine.global_step, {episode.uuid: closed_reason})
            return pooled_or_dropped(episode.uuid, closed_reason), [sample]
        return self._add_to_task(sample, episode.calls)

    def _rejoin_task(self, sample: ScoredSample, calls: Sequence[RecordedCall]) -> None:
        """Add an ended episode from an earlier server process to its task.

        If this completes the task, store the task's group. The task may have had too few episodes
        before the restart and have enough now, because the new job may need fewer episodes per
        task.
        """
        group, members = self._add_to_task(sample, calls)
        if group is not None:
            self._journal.put(row_changes.task_completed(group, members))

    def _add_to_task(
        self, sample: ScoredSample, calls: Sequence[RecordedCall]
    ) -> tuple[PooledGroup | None, list[ScoredSample]]:
        """Add an ended episode to its task. If this completes the task, return the task's group and
        its samples. Otherwise return (None, [])."""
        assert sample.reward is not None and sample.task_id is not None
        completed = self.pool.add_episode(sample.task_id, sample.reward, calls, owner=sample.owner)
        return (None, []) if completed is None else _rows_of(completed)

    def _with_calls(self, reply: EndGroupReply, request: EndGroupRequest) -> EndGroupReply:
        """Return `reply` with the group's captured calls. If the group has no calls in memory, the
        calls are read from the journal. Calls that were deleted from the journal are left out."""
        if reply.calls or not reply.success:
            return reply
        kept = self._journal.read(reads.calls_by_sibling, request.group_id, len(request.rewards))
        calls, prompts = with_prompts_apart(kept)
        return reply.model_copy(update={"calls": calls, "prompts": prompts})

    async def _write(self, *change: Change) -> None:
        """Write a change to the journal, and wait until it is on disk.

        Without a change, wait until all earlier changes are on disk. A repeated request needs this
        wait. The first request may have been cancelled after it had queued its change, and before
        the change was on disk.
        """
        await self._journal.wait_written(self._journal.put(*change))

    async def _write_calls(self, *changes: Change) -> None:
        position = self._journal.put(*changes)
        if self._journal.error is None:
            with contextlib.suppress(JournalError):
                await self._journal.wait_written(position, CALL_LIMIT_S)


def _warning(episode: Episode, closed_reason: str | None) -> str:
    if closed_reason is None or episode.kind == "eval":
        return episode.warning
    return describe_closed_run(closed_reason)


def _rows_of(completed: CompletedTask) -> tuple[PooledGroup, list[ScoredSample]]:
    group = completed.group
    members = [
        ScoredSample(episode.owner, episode.index, episode.reward) for episode in group.episodes
    ]
    return pooled_or_dropped(group.group_id, completed.reason), members
