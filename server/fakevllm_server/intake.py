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

from fakevllm_adapters.swarm import (
    AddSampleRequest,
    EndEpisodeRequest,
    EndGroupReply,
    EndGroupRequest,
    SiblingRef,
    SuccessReply,
)
from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.calls import RecordedCall
from fakevllm_server.engine import Engine
from fakevllm_server.episodes import Episode, Episodes
from fakevllm_server.journal import changes, reads
from fakevllm_server.journal.facts import (
    PooledGroup,
    ScoredSample,
    Submission,
)
from fakevllm_server.journal.store import Journal
from fakevllm_server.journal.tables import GroupState
from fakevllm_server.journal.writer import Change, JournalTrouble
from fakevllm_server.pool import Completed, Pool
from fakevllm_server.runlog import RunLog
from fakevllm_server.submissions import Acknowledged, OtherBody, Submissions, hash_of

Reply = TypeVar("Reply", bound=BaseModel)

_Decided = tuple[Reply, Callable[[Submission], Change] | None]
"""A reply, and the change it acknowledges; None where there is none."""

CALL_LIMIT_S = 2.0
"""How long the end of an answer waits for its record: no longer than an app would notice."""


class Intake:
    def __init__(self, journal: Journal, runlog: RunLog, engine: Engine) -> None:
        self._journal = journal
        self._log = runlog
        self._engine = engine
        self._submissions = Submissions()
        self.episodes = Episodes()
        self.pool = self._new_pool(None)

    def resume(self, job: TrainJob | None, now: float) -> None:
        """What the journal holds, for this job. Once at the start of a life, and at that of an
        engine, when nothing is on its way."""
        found = self._journal.read(reads.waiting, now)
        self.episodes = Episodes()
        self.episodes.reopen(found.open_episodes)
        for episode in found.claimed:
            self.episodes.restore(episode)
        self.pool = self._new_pool(job)
        dropped = self.pool.restore(found.groups, found.open_groups, now)
        dropped |= dict.fromkeys(found.corrupt, reads.CORRUPT)
        dropped |= self._give_up_corrupt(found)
        for sample, calls in found.samples:
            self._join_task(sample, calls)
        self._log.dropped(self._engine.global_step, dropped)

    # --- episodes

    async def claim(
        self, client_uuid: str, kind: str, idle_limit_s: float, owner: str = ""
    ) -> Episode:
        """Raises JournalTrouble."""
        self._journal.check_room()
        episode = self.episodes.claim(client_uuid, kind, idle_limit_s, time.monotonic(), owner)
        await self._written(changes.claimed(episode))
        return episode

    async def end_episode(
        self, request: EndEpisodeRequest, reward: float, closed: str | None
    ) -> SuccessReply:
        """Raises EpisodeRefused, OtherBody, JournalTrouble."""

        def decide() -> _Decided[SuccessReply]:
            episode = self.episodes.end(request.episode_uuid, request.client_uuid)
            sample = ScoredSample(episode.uuid, 0, reward, request.task_id)
            group, members = self._group_of(episode, sample, closed)
            ended = partial(changes.episode_ended, episode.episode_id, sample, group, members)
            return SuccessReply(success=True), ended

        is_new = self.episodes.find(request.episode_uuid) is not None
        key = f"episode:{request.episode_uuid}"
        return await self._once(key, request, SuccessReply, decide, is_new=is_new)

    async def abort_episode(self, uuid: str, client_uuid: str) -> None:
        """Raises JournalTrouble."""
        episode = self.episodes.abort(uuid, client_uuid)
        await self._written(*([] if episode is None else [changes.reopened([episode])]))

    def sweep(self, now: float) -> None:
        """Claims that ran out are open again; tasks whose other episodes stay away are over."""
        idle = self.episodes.sweep(now)
        if idle:
            self._journal.put(changes.reopened(idle))
        for left in self.pool.complete_left(now):
            self._journal.put(changes.task_completed(*_group_and_members(left)))

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
        """Raises OtherBody, JournalTrouble."""

        def decide() -> _Decided[EndGroupReply]:
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
            group = _group(request.group_id, reply.failure_reason)
            return reply, partial(changes.group_ended, group, samples) if reply.success else None

        reply = await self._once(f"group:{request.group_id}", request, EndGroupReply, decide)
        return self._with_calls(reply, request)

    async def add_sample(
        self, request: AddSampleRequest, calls: Sequence[RecordedCall], closed: str | None
    ) -> EndGroupReply:
        """Raises OtherBody, JournalTrouble."""
        name, advantage = request.sample_id, request.advantage

        def decide() -> _Decided[EndGroupReply]:
            step = self._engine.collecting_step
            reply = self.pool.add_sample(name, calls, advantage, step, closed=closed)
            sample = ScoredSample(SiblingRef(name, 0).episode_id, 0, advantage)
            group = _group(name, reply.failure_reason, advantage)
            added = partial(changes.group_ended, group, [sample], calls=calls)
            return reply, added if reply.success else None

        return await self._once(f"sample:{name}", request, EndGroupReply, decide)

    async def abort_group(self, group_id: str) -> None:
        """Raises JournalTrouble."""
        is_new = self.pool.abort_group(group_id)
        await self._written(*([changes.group_aborted(group_id)] if is_new else []))

    # --- the journal

    def _new_pool(self, job: TrainJob | None) -> Pool:
        return Pool(job, lambda group_id: self._journal.read(reads.why_ended, group_id))

    def _give_up_corrupt(self, found: reads.Waiting) -> dict[str, str]:
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
            self._log.dropped(self._engine.global_step, {episode.uuid: closed})
            return _group(episode.uuid, closed), [sample]
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
        return (None, []) if completed is None else _group_and_members(completed)

    async def _once(
        self,
        key: str,
        request: BaseModel,
        kind: type[Reply],
        decide: Callable[[], _Decided[Reply]],
        *,
        is_new: bool = False,
    ) -> Reply:
        """What was answered to the same before; else what is decided now, once it is on disk.
        `is_new`: what it ends is open here, so nothing was ever answered. Raises OtherBody,
        JournalTrouble."""
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
        latest = Acknowledged(body_hash, reply, place)
        self._submissions.remember(key, latest, self._journal.reached)
        await self._journal.reach(place)
        return reply

    async def _known(self, key: str, body_hash: bytes, kind: type[Reply]) -> Reply | None:
        """What was answered to the same before. Raises OtherBody, JournalTrouble."""
        latest = self._submissions.find(key)
        if latest is not None:
            if latest.body_hash != body_hash:
                raise OtherBody
            await self._journal.reach(latest.place)
            assert isinstance(latest.reply, kind)
            return latest.reply
        kept = self._journal.read(reads.submission, key)
        if kept is None:
            return None
        if kept.body_hash != body_hash:
            raise OtherBody
        return kind.model_validate_json(kept.reply_json)

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
            with contextlib.suppress(JournalTrouble):
                await self._journal.reach(place, CALL_LIMIT_S)


def _group(group_id: str, reason: str | None, advantage: float | None = None) -> PooledGroup:
    """Pooled, unless there is a reason why not."""
    state = GroupState.DROPPED if reason else GroupState.POOLED
    return PooledGroup(group_id, state, reason or None, advantage)


def _group_and_members(completed: Completed) -> tuple[PooledGroup, list[ScoredSample]]:
    group = completed.group
    members = [ScoredSample(one.owner, one.index, one.reward) for one in group.episodes]
    return _group(group.group_id, completed.reason), members
