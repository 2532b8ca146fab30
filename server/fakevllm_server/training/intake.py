"""What clients hand in: decided in memory, written to the journal, and acknowledged only then.

Accepted in every state of the engine: the age of its weights decides what is used, not the moment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from pydantic import BaseModel

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.closed_run import describe_closed_run
from fakevllm_adapters.protocol.pool import ThrottlePolicy
from fakevllm_adapters.protocol.swarm import (
    AddSampleRequest,
    EndEpisodeReply,
    EndEpisodeRequest,
    EndGroupReply,
    EndGroupRequest,
    SiblingRef,
)
from fakevllm_adapters.vllm_compat.context import bounded
from fakevllm_server.episodes.participation import Participation
from fakevllm_server.episodes.pool import Pool
from fakevllm_server.episodes.registry import Episode, EpisodeRegistry, Idempotency
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.episodes.submissions import (
    CachedReply,
    IdempotencyConflict,
    SubmissionCache,
    hash_of,
)
from fakevllm_server.episodes.waiting_tasks import CompletedTask
from fakevllm_server.journal import changes, reads
from fakevllm_server.journal.rows import (
    PooledGroup,
    ScoredSample,
    Submission,
    clients_that_wait,
    pooled_or_dropped,
)
from fakevllm_server.journal.store import Journal
from fakevllm_server.journal.tables import GroupState
from fakevllm_server.journal.writer import Change, JournalError
from fakevllm_server.run.log import RunLog
from fakevllm_server.types.calls import RecordedCall

CALL_LIMIT_S = 2.0
"""How long the end of an answer waits for its record: no longer than an app would notice."""


def _warning(episode: Episode, closed: str | None) -> str:
    if closed is None or episode.kind == "eval":
        return episode.warning
    return describe_closed_run(closed)


class Intake:
    def __init__(self, journal: Journal, runlog: RunLog, engine: EngineLifecycle) -> None:
        self._journal = journal
        self._log = runlog
        self._engine = engine
        self._acknowledging = Acknowledger(journal)
        self.episodes = EpisodeRegistry()
        self.pool = self._new_pool(None)
        self.participation = Participation(self.pool, engine)

    def resume(self, job: TrainJob | None, now: float) -> None:
        """What the journal holds, for this job. Once at the start of a life, and at that of an
        engine, when nothing is on its way."""
        found = self._journal.read(reads.waiting, now)
        self.episodes = EpisodeRegistry()
        self.episodes.reopen(found.open_episodes)
        for episode in found.claimed:
            self.episodes.restore(episode)
        self.pool = self._new_pool(job)
        self.pool.clients.restore(self._journal.read(clients_that_wait))
        self.participation = Participation(self.pool, self._engine)
        dropped = self.pool.restore(found.groups, found.open_groups, now)
        dropped |= dict.fromkeys(found.corrupt, reads.CORRUPT)
        dropped |= self._give_up_corrupt(found)
        for sample, calls in found.samples:
            self._join_task(sample, calls)
        self._log.record_drops(self._engine.global_step, dropped)

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
        """Raises JournalError."""
        self._journal.check_room()
        now = time.monotonic()
        episode = self.episodes.claim(client_uuid, kind, idle_limit_s, now, owner, idempotency)
        self.participation.claimed(episode, policy, now)
        await self._written(changes.claimed(episode))
        return episode

    async def renew_claim(
        self,
        client_uuid: str,
        owner: str,
        idempotency: Idempotency,
        policy: ThrottlePolicy | None = None,
    ) -> Episode | None:
        """What the same request has claimed before, as long as it stands. Raises
        IdempotencyConflict, JournalError."""
        episode = self.episodes.find_claim(client_uuid, owner, idempotency)
        if episode is None:
            return None
        now = time.monotonic()
        self.episodes.renew(episode, now)
        self.participation.clients.seen(client_uuid, now)
        if not episode.task_id:  # of an earlier life, which the journal does not tell
            self.participation.claimed(episode, policy, now)
        await self._written()
        return episode

    async def end_episode(
        self, request: EndEpisodeRequest, reward: float, closed: str | None
    ) -> EndEpisodeReply:
        """Raises EpisodeRefused, IdempotencyConflict, JournalError."""

        def decide() -> Decided[EndEpisodeReply]:
            episode = self.episodes.end(request.episode_uuid, request.client_uuid)
            waits = request.task_id if closed is None else None
            is_active = request.declare_client_active
            self.participation.over(episode, waits, is_active, time.monotonic())
            sample = ScoredSample(episode.uuid, 0, reward, request.task_id)
            group, members = self._group_of(episode, sample, closed)
            is_eval = episode.kind == "eval"
            told = self._log.record_evaluation(reward, time.time()) if is_eval else None
            if not is_eval:
                self._log.record_client_metrics(request.workflow_output.log_metrics)
            ended = partial(changes.episode_ended, episode.episode_id, sample, group, members)
            reply = EndEpisodeReply(success=True, warning=_warning(episode, closed))
            return reply, partial(ended, evaluated=told)

        is_new = self.episodes.find(request.episode_uuid) is not None
        key = f"episode:{request.episode_uuid}"
        return await self._acknowledging.once(key, request, EndEpisodeReply, decide, is_new=is_new)

    async def abort_episode(self, uuid: str, client_uuid: str, is_active: bool = True) -> None:
        """Raises JournalError."""
        episode = self.episodes.abort(uuid, client_uuid)
        if episode is not None:
            self.participation.over(episode, None, is_active, time.monotonic())
        await self._written(*([] if episode is None else [changes.reopened([episode])]))

    def sweep(self, now: float) -> None:
        """Claims that ran out are open again; tasks whose other episodes stay away are over."""
        idle = self.episodes.sweep(now)
        if idle:
            self._journal.put(changes.reopened(idle))
        self.participation.lapsed(idle, now)
        for left in self.pool.complete_left(now):
            self._journal.put(changes.task_completed(*self._told(left)))

    def complete_all(self) -> None:
        """Before a step that takes what there is."""
        for one in self.pool.complete_all():
            self._journal.put(changes.task_completed(*self._told(one)))

    def give_up_episodes(self) -> None:
        """The engine has been stopped."""
        claimed = self.episodes.give_up()
        if claimed:
            self._journal.put(changes.reopened(claimed))

    # --- calls

    async def add_call(self, sibling: SiblingRef, call: RecordedCall) -> None:
        """One that is not in the journal in time is told to nobody: the app is served."""
        if self._journal.is_full:
            return
        seq = self.pool.add_call(sibling, call, time.monotonic())
        if seq is not None:
            await self._kept(changes.call_ended(sibling.episode_id, seq, call, sibling.group_id))

    async def add_episode_call(self, episode: Episode, call: RecordedCall) -> None:
        if self.episodes.find(episode.uuid) is not episode or self._journal.is_full:
            return
        episode.calls.append(call)
        await self._kept(changes.call_ended(episode.uuid, len(episode.calls) - 1, call))

    # --- groups

    async def end_group(self, request: EndGroupRequest, closed: str | None) -> EndGroupReply:
        """Raises IdempotencyConflict, JournalError."""

        def decide() -> Decided[EndGroupReply]:
            reply = self.pool.end_group(
                request.group_id,
                request.rewards,
                self._engine.collecting_step,
                closed=closed,
                served=request.served,
                parent_id=request.parent_id,
            )
            samples = [
                ScoredSample(SiblingRef(request.group_id, index).episode_id, index, reward)
                for index, reward in enumerate(request.rewards)
            ]
            group = pooled_or_dropped(request.group_id, reply.failure_reason)
            return reply, partial(changes.group_ended, group, samples) if reply.success else None

        reply = await self._acknowledging.once(
            f"group:{request.group_id}", request, EndGroupReply, decide
        )
        return self._with_calls(reply, request)

    async def add_sample(
        self, request: AddSampleRequest, calls: Sequence[RecordedCall], closed: str | None
    ) -> EndGroupReply:
        """Raises IdempotencyConflict, JournalError."""
        name, advantage = request.sample_id, request.advantage

        def decide() -> Decided[EndGroupReply]:
            step = self._engine.collecting_step
            reply = self.pool.add_sample(name, calls, advantage, step, closed=closed)
            sample = ScoredSample(SiblingRef(name, 0).episode_id, 0, advantage)
            group = pooled_or_dropped(name, reply.failure_reason, advantage)
            added = partial(changes.group_ended, group, [sample], calls=calls)
            return reply, added if reply.success else None

        return await self._acknowledging.once(f"sample:{name}", request, EndGroupReply, decide)

    async def abort_group(self, group_id: str) -> None:
        """Raises JournalError."""
        is_new = self.pool.abort_group(group_id)
        await self._written(*([changes.group_aborted(group_id)] if is_new else []))

    # --- the journal

    def _new_pool(self, job: TrainJob | None) -> Pool:
        return Pool(job, lambda group_id: self._journal.read(reads.why_ended, group_id))

    def _give_up_corrupt(self, found: reads.PendingWork) -> dict[str, str]:
        """Claims are open again, as if they had run out; samples that wait are dropped alone."""
        claims, samples = found.corrupt_claims, found.corrupt_samples
        if claims:
            self.episodes.reopen([(one.episode_id, one.epoch) for one in claims])
            self._journal.put(changes.reopened(claims))
        for one in samples:
            group = PooledGroup(one.owner, GroupState.DROPPED, reads.CORRUPT)
            self._journal.put(changes.task_completed(group, [one]))
        return {one.owner: reads.CORRUPT for one in samples}

    def _group_of(
        self, episode: Episode, sample: ScoredSample, closed: str | None
    ) -> tuple[PooledGroup | None, list[ScoredSample]]:
        """What an ended episode completes, and all that is in it: its task, or, where it is not
        pooled, itself."""
        if episode.kind == "eval":
            return PooledGroup(episode.uuid, GroupState.EVAL), [sample]
        if closed is not None:
            self._log.record_drops(self._engine.global_step, {episode.uuid: closed})
            return pooled_or_dropped(episode.uuid, closed), [sample]
        return self._completed(sample, episode.calls)

    def _join_task(self, sample: ScoredSample, calls: Sequence[RecordedCall]) -> None:
        """An episode of an earlier life, whose task this job may complete with fewer."""
        group, members = self._completed(sample, calls)
        if group is not None:
            self._journal.put(changes.task_completed(group, members))

    def _completed(
        self, sample: ScoredSample, calls: Sequence[RecordedCall]
    ) -> tuple[PooledGroup | None, list[ScoredSample]]:
        """The group that its task has come to with it, if it has."""
        assert sample.reward is not None and sample.task_id is not None
        completed = self.pool.add_episode(sample.task_id, sample.reward, calls, owner=sample.owner)
        return (None, []) if completed is None else self._told(completed)

    def _told(self, completed: CompletedTask) -> tuple[PooledGroup, list[ScoredSample]]:
        group = completed.group
        members = [ScoredSample(one.owner, one.index, one.reward) for one in group.episodes]
        return pooled_or_dropped(group.group_id, completed.reason), members

    def _with_calls(self, reply: EndGroupReply, request: EndGroupRequest) -> EndGroupReply:
        """The calls of a reply that comes from the journal, as far as they are kept."""
        if reply.calls or not reply.success:
            return reply
        kept = self._journal.read(reads.calls_by_sibling, request.group_id, len(request.rewards))
        return reply.model_copy(
            update={"calls": [[call.to_wire() for call in calls] for calls in kept]}
        )

    async def _written(self, *change: Change) -> None:
        """Where there is none, it may have been put before and not be written yet."""
        await self._journal.reach(self._journal.put(*change))

    async def _kept(self, change: Change) -> None:
        place = self._journal.put(change)
        if self._journal.trouble is None:
            with contextlib.suppress(JournalError):
                await self._journal.reach(place, CALL_LIMIT_S)


# What is decided once, written to the journal, and acknowledged only then.

Reply = TypeVar("Reply", bound=BaseModel)

Decided = tuple[Reply, Callable[[Submission], Change] | None]
"""A reply, and the change it acknowledges; None where there is none."""


class Acknowledger:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._submissions = SubmissionCache()

    async def once(
        self,
        key: str,
        request: BaseModel,
        kind: type[Reply],
        decide: Callable[[], Decided[Reply]],
        *,
        is_new: bool = False,
    ) -> Reply:
        """What was answered to the same before; else what is decided now, once it is on disk.
        `is_new`: what it ends is open here, so nothing was ever answered. Raises
        IdempotencyConflict, JournalError."""
        body_hash = hash_of(request)
        known = None if is_new else await self._known(key, body_hash, kind)
        if known is not None:
            return known
        self._journal.check_room()
        reply, change = decide()
        if change is None:
            return reply
        submission = Submission(key, body_hash, reply.model_dump_json(exclude={"calls"}))
        place = self._journal.put(change(submission))
        latest = CachedReply(body_hash, reply, place)
        self._submissions.remember(key, latest, self._journal.reached)
        await self._journal.reach(place)
        return reply

    async def _known(self, key: str, body_hash: bytes, kind: type[Reply]) -> Reply | None:
        """What was answered to the same before. Raises IdempotencyConflict, JournalError."""
        latest = self._submissions.find(key)
        if latest is not None:
            if latest.body_hash != body_hash:
                raise IdempotencyConflict
            await self._journal.reach(latest.place)
            assert isinstance(latest.reply, kind)
            return latest.reply
        kept = self._journal.read(reads.submission, key)
        if kept is None:
            return None
        if kept.body_hash != body_hash:
            raise IdempotencyConflict
        return kind.model_validate_json(kept.reply_json)


# What the job adds to a call of an active client's episode. Pure.

_UNTOLD = TrainJob().temperature


def with_job(body: Json, job: TrainJob) -> Json:
    """The same object where the job adds nothing. What a client asks for counts, but for the
    length; a job of temperature 1 leaves it to the engine's own default.

    >>> with_job({"prompt": "Hi"}, TrainJob(temperature=0.9))
    {'prompt': 'Hi', 'temperature': 0.9}
    """
    most = job.max_response_length_in_one_turn
    body = body if most is None else bounded(body, most)
    if job.temperature == _UNTOLD or body.get("temperature") is not None:
        return body
    return {**body, "temperature": job.temperature}
