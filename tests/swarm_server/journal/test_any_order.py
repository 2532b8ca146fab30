"""Acknowledged work is trained once, waits, or is dropped with a reason, after any order of events.

Events are requests of clients, kills of the server, and losses of the trainer.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from pydantic import BaseModel
from swarm_server.samples import call

from fakevllm_adapters.protocol.packed_numbers import pack_ids
from fakevllm_adapters.protocol.swarm import (
    AddDemonstrationRequest,
    AddSampleRequest,
    DemonstrationIds,
    EndEpisodeRequest,
    EndGroupReply,
    EndGroupRequest,
    SiblingRef,
    WorkflowOutput,
)
from fakevllm_server.episodes.episode_registry import Episode, EpisodeRefused, Idempotency
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.journal import reads
from fakevllm_server.types.backend import BackendError
from fakevllm_server.types.calls import RecordedCall
from fakevllm_server.types.edit_demonstrations import parse_demonstrations
from tests.swarm_server.journal.client_records import (
    AcknowledgedRequest,
    Claim,
    ClientRecords,
    EndedEpisode,
    Request,
)
from tests.swarm_server.journal.process_kill import Outcome, kill_at
from tests.swarm_server.journal.run_invariants import RunInvariants
from tests.swarm_server.journal.server_process import EDIT, JOB, ServerProcess

T = TypeVar("T")
CLIENT = "a client"
HOUR_S = 3600.0
LONG_H = 100
SHORT_S = 600.0
GROUPS = ["g0", "g1", "g2", "g3"]
TASKS = ["t0", "t1"]
REWARDS = st.sampled_from([0.0, 0.5, 1.0])
SIDES = ("before", "after")
PICK = st.integers(0, 5)


def fates(*labels: str) -> st.SearchStrategy[str | None]:
    """Return crash points at which the process is killed; None lets it live."""
    points = [f"{label}.{side}_commit" for label in labels for side in SIDES]
    return st.one_of(st.none(), st.none(), st.none(), st.sampled_from(points))


STEP_POINTS = [
    *("plan.before_commit", "plan.after_commit", "train.updated", "save.written", "save.renamed"),
    *("train.before_commit", "train.after_commit", "prune.before_commit", "prune.after_commit"),
]
STEP_FATES = st.none() | st.sampled_from(STEP_POINTS)


class AnyOrder(RuleBasedStateMachine):
    """Requests, kills and losses in any order. `fate` is the crash point of a kill, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.temporary = tempfile.TemporaryDirectory(prefix="journal-")
        self.folder_numbers = itertools.count()
        self.serial = itertools.count(1)
        self.records = ClientRecords()
        self.started_at = time.monotonic()

    @initialize(save_freq=st.integers(1, 3), num_repeat=st.integers(1, 3))
    def begin(self, save_freq: int, num_repeat: int) -> None:
        own = {
            "save_freq": save_freq,
            "num_repeat": num_repeat,
            "demonstration_loss": "dpo",  # trains users' edits
            "partial_after_s": LONG_H * HOUR_S / 2,  # sweeps of claims leave tasks alone
        }
        self.process = ServerProcess(self._folder(), JOB.model_copy(update=own))
        self.run(self.process.boot_trainer())

    def teardown(self) -> None:
        if hasattr(self, "process"):
            self.process.close()
        self.runner.close()
        self.temporary.cleanup()

    # --- helpers of the rules

    def run(self, action: Awaitable[T]) -> T:
        async def coroutine() -> T:
            return await action

        return self.runner.run(coroutine())

    def act(self, fate: str | None, action: Callable[[], Awaitable[T]]) -> Outcome[T]:
        """Run an action until its changes are on disk, or until the kill at `fate`."""

        async def coroutine() -> Outcome[T]:
            if fate is None:
                result = await action()
                await self.process.journal.flush()
                return Outcome(result, None, is_acknowledged=True)
            return await kill_at(self.process, fate, self._folder(), action)

        outcome = self.run(coroutine())
        if outcome.next_process is not None:
            self.continue_with(outcome.next_process)
        return outcome

    def has_effect(self, fate: str | None, outcome: Outcome[Any]) -> bool:
        """Return whether the action was acknowledged or its change is on disk."""
        is_lost = outcome.next_process is not None and fate is not None and "before" in fate
        return outcome.is_acknowledged or not is_lost

    def continue_with(self, process: ServerProcess) -> None:
        self.process = process
        self.records.restart()
        self.run(process.boot_trainer())

    def record_acknowledged(
        self, request: Request, conflicting_request: Request, reply: BaseModel
    ) -> None:
        self.records.acknowledged.append(AcknowledgedRequest(request, conflicting_request, reply))

    def changes_nothing(self, action: Awaitable[T]) -> T:
        before = self.process.content()
        result = self.run(action)
        assert self.process.content() == before
        return result

    def new_call(self) -> RecordedCall:
        return call(ids=(next(self.serial), 1))

    def pick_claim(self, pick: int) -> Claim:
        claims = list(self.records.claims.values())
        return claims[pick % len(claims)]

    def episode(self, claim: Claim) -> Episode:
        episode = self.process.intake.episodes.find_owned(claim.uuid, CLIENT)
        assert self.process.intake.episodes.find_by_key(claim.key) is episode
        return episode

    def _folder(self) -> Path:
        return Path(self.temporary.name) / f"{next(self.folder_numbers)}"

    # --- episodes

    @rule(
        kind=st.sampled_from(["train", "train", "eval"]), short=st.booleans(), fate=fates("claim")
    )
    def claim(self, kind: str, short: bool, fate: str | None) -> None:
        limit_s = SHORT_S if short else 1e9
        idempotency = Idempotency(f"key {next(self.serial)}", b"so")
        outcome = self.act(
            fate,
            lambda: self.process.intake.claim(CLIENT, kind, limit_s, idempotency=idempotency),
        )
        if self.has_effect(fate, outcome):
            one = outcome.result
            known = {claim.uuid for claim in self.records.expired}
            assert one.uuid not in known | set(self.records.claims) | set(self.records.ended)
            self.records.add_claim(
                Claim(one.episode_id, one.uuid, one.key, kind, short, idempotency)
            )
        else:
            assert self.repeat_claim(idempotency) is None

    def repeat_claim(self, idempotency: Idempotency) -> Episode | None:
        return self.changes_nothing(self.process.intake.renew_claim(CLIENT, "", idempotency))

    @precondition(lambda self: self.records.claims)
    @rule(pick=PICK)
    def repeat_a_claim(self, pick: int) -> None:
        claim = self.pick_claim(pick)
        assert self.repeat_claim(claim.idempotency) is self.episode(claim)
        claim.renewed_at_h = 0

    @precondition(lambda self: self.records.expired or self.records.ended)
    @rule(pick=PICK)
    def repeat_an_ended_claim(self, pick: int) -> None:
        ended = self.records.expired + [one.claim for one in self.records.ended.values()]
        claim = ended[pick % len(ended)]
        assert self.repeat_claim(claim.idempotency) is None

    @precondition(lambda self: self.records.claims)
    @rule(pick=PICK, fate=fates("call"))
    def record_episode_call(self, pick: int, fate: str | None) -> None:
        claim, one = self.pick_claim(pick), self.new_call()
        episode = self.episode(claim)
        outcome = self.act(fate, lambda: self.process.intake.add_episode_call(episode, one))
        if self.has_effect(fate, outcome):
            claim.calls.append(one)

    @precondition(lambda self: self.records.claims)
    @rule(pick=PICK, at_h=st.integers(1, 3))
    def renew(self, pick: int, at_h: int) -> None:
        self.renew_at(self.pick_claim(pick), at_h)

    def renew_at(self, claim: Claim, at_h: int) -> None:
        self.process.intake.episodes.renew(self.episode(claim), self.started_at + at_h * HOUR_S)
        claim.renewed_at_h = at_h

    @rule(at_h=st.integers(1, 4), fate=fates("reopen"))
    def sweep(self, at_h: int, fate: str | None) -> None:
        expired = self.records.claims_expired_at(at_h)

        async def sweep() -> None:
            self.process.intake.sweep(self.started_at + at_h * HOUR_S)

        outcome = self.act(fate, sweep)
        # No reply reports that a claim has expired, so the claim may be valid again after a kill.
        is_lost = outcome.next_process is not None and fate == "reopen.before_commit"
        for claim in [] if is_lost else expired:
            self.records.expire(claim)

    @rule(fate=fates("complete"))
    def complete_partial_tasks(self, fate: str | None) -> None:
        for claim in self.records.claims.values():
            self.renew_at(claim, LONG_H)
        waiting: defaultdict[str | None, set[str]] = defaultdict(set)
        for sample, _ in self.process.waiting().samples:
            waiting[sample.task_id].add(sample.owner)

        async def sweep() -> None:
            self.process.intake.sweep(self.started_at)
            self.process.intake.sweep(self.started_at + LONG_H * HOUR_S)

        outcome = self.act(fate, sweep)
        self.records.partial_tasks |= {frozenset(owners) for owners in waiting.values()}
        if outcome.next_process is None:
            assert not self.process.waiting().samples

    @precondition(lambda self: self.records.claims)
    @rule(pick=PICK, task=st.sampled_from(TASKS), reward=REWARDS, fate=fates("end_episode"))
    def end_episode(self, pick: int, task: str, reward: float, fate: str | None) -> None:
        claim = self.pick_claim(pick)

        def request_with(reward: float) -> Request:
            end = EndEpisodeRequest(
                client_uuid=CLIENT,
                episode_uuid=claim.uuid,
                task_id=task,
                workflow_output=WorkflowOutput(reward=reward, metadata={"task_id": task}),
            )
            return lambda process: process.intake.end_episode(end, reward, None)

        request = request_with(reward)
        outcome = self.act(fate, lambda: request(self.process))
        if self.has_effect(fate, outcome):
            self.records.end_episode(EndedEpisode(claim, task, reward))
            self.record_acknowledged(request, request_with(0.25), outcome.result)

    @precondition(lambda self: self.records.claims)
    @rule(pick=PICK, fate=fates("reopen"))
    def abort_episode(self, pick: int, fate: str | None) -> None:
        claim = self.pick_claim(pick)
        outcome = self.act(fate, lambda: self.process.intake.abort_episode(claim.uuid, CLIENT))
        if self.has_effect(fate, outcome):
            self.records.expire(claim)

    @rule(task=st.sampled_from(TASKS), reward=REWARDS)
    def end_a_new_episode(self, task: str, reward: float) -> None:
        self.claim("train", False, None)
        last = len(self.records.claims) - 1
        self.record_episode_call(last, None)
        self.end_episode(last, task, reward, None)

    @precondition(lambda self: self.records.expired)
    @rule(pick=PICK)
    def use_an_expired_claim(self, pick: int) -> None:
        claim = self.records.expired[pick % len(self.records.expired)]
        end = EndEpisodeRequest(client_uuid=CLIENT, episode_uuid=claim.uuid, task_id="t0")
        late = Episode(claim.episode_id, 1, claim.key, CLIENT, claim.kind, SHORT_S, 0.0)

        async def send_late_requests() -> None:
            assert self.process.intake.episodes.find_by_key(claim.key) is None
            assert self.process.intake.episodes.find(claim.uuid) is None
            await self.process.intake.add_episode_call(late, self.new_call())
            await self.process.intake.abort_episode(claim.uuid, CLIENT)
            try:
                await self.process.intake.end_episode(end, 1.0, None)
            except EpisodeRefused:
                return
            raise AssertionError("an older epoch was ended")

        self.changes_nothing(send_late_requests())

    # --- groups

    @rule(name=st.sampled_from(GROUPS), index=st.integers(0, 2), fate=fates("call"))
    def record_sibling_call(self, name: str, index: int, fate: str | None) -> None:
        one = self.new_call()
        outcome = self.act(fate, lambda: self.process.intake.add_call(SiblingRef(name, index), one))
        if self.has_effect(fate, outcome):
            self.records.capture(name, index, one)

    @precondition(lambda self: self.records.open_groups)
    @rule(pick=PICK, rewards=st.lists(REWARDS, min_size=2, max_size=3), fate=fates("end_group"))
    def end_group(self, pick: int, rewards: list[float], fate: str | None) -> None:
        names = list(self.records.open_groups)
        name = names[pick % len(names)]
        if not any(self.records.open_groups[name].get(index) for index in range(len(rewards))):
            return  # no scored sibling could be trained

        def request_with(rewards: list[float]) -> Request:
            end = EndGroupRequest(group_id=name, rewards=list(rewards))
            return lambda process: process.intake.end_group(end, None)

        request = request_with(rewards)
        outcome = self.act(fate, lambda: request(self.process))
        reply = outcome.result
        assert isinstance(reply, EndGroupReply) and reply.pooled
        if self.has_effect(fate, outcome):
            self.records.end_group(name, len(rewards))
            expected = [[one.to_wire() for one in calls] for calls in self._calls_of(name)]
            assert reply.with_prompts_per_call().calls == expected
            self.record_acknowledged(request, request_with([*rewards, 0.0]), reply)

    @rule(name=st.sampled_from(GROUPS), fate=fates("abort_group"))
    def abort_group(self, name: str, fate: str | None) -> None:
        async def abort() -> None:
            await self.process.intake.abort_group(name)

        if self.has_effect(fate, self.act(fate, abort)):
            self.records.abort_group(name)

    @rule(number=st.integers(0, 3), advantage=REWARDS, fate=fates("end_group"))
    def add_sample(self, number: int, advantage: float, fate: str | None) -> None:
        name = f"s{number}"
        if name in self.records.ended_groups:
            return  # another rule repeats requests
        one = self.new_call()

        def request_with(advantage: float) -> Request:
            sample = AddSampleRequest(
                sample_id=name, run_id="r", advantage=advantage, calls=[one.to_wire()]
            )
            return lambda process: process.intake.add_sample(sample, [one], None)

        request = request_with(advantage)
        outcome = self.act(fate, lambda: request(self.process))
        if self.has_effect(fate, outcome):
            self.records.ended_groups[name] = {0: [one]}
            self.record_acknowledged(request, request_with(0.25), outcome.result)

    @rule(number=st.integers(0, 3), fate=fates("end_group"))
    def add_edit(self, number: int, fate: str | None) -> None:
        name = f"{EDIT}g/{number}"
        if name in self.records.ended_groups:
            return  # another rule repeats requests
        served, edit = next(self.serial), next(self.serial)

        def sent_with(edit: int) -> AddDemonstrationRequest:
            prompt_ids = pack_ids([1, 2])
            pair = [
                DemonstrationIds(
                    kind="chosen", prompt_ids=prompt_ids, response_ids=pack_ids([edit])
                ),
                DemonstrationIds(
                    kind="rejected", prompt_ids=prompt_ids, response_ids=pack_ids([served])
                ),
            ]
            return AddDemonstrationRequest(sample_id=name, run_id="r", demonstrations=pair)

        def request_with(edit: int) -> Request:
            sent = sent_with(edit)
            loss, calls = parse_demonstrations(sent)
            return lambda process: process.intake.add_demonstration(sent, loss, calls, None)

        request = request_with(edit)
        outcome = self.act(fate, lambda: request(self.process))
        if self.has_effect(fate, outcome):
            _, calls = parse_demonstrations(sent_with(edit))
            self.records.ended_groups[name] = {index: [one] for index, one in enumerate(calls)}
            self.record_acknowledged(request, request_with(edit + 1), outcome.result)

    def _calls_of(self, name: str) -> list[list[RecordedCall]]:
        return list(self.records.ended_groups[name].values())

    # --- repeated requests

    @precondition(lambda self: self.records.acknowledged)
    @rule(pick=st.integers(0, 50))
    def repeat_a_request(self, pick: int) -> None:
        known = self.records.acknowledged[pick % len(self.records.acknowledged)]
        again = self.changes_nothing(known.request(self.process))
        # The reply contains the calls of a group only while they are kept.
        excluded = {"calls"} if isinstance(again, EndGroupReply) else set[str]()
        assert again.model_dump(exclude=excluded) == known.reply.model_dump(exclude=excluded)

    @precondition(lambda self: self.records.acknowledged)
    @rule(pick=st.integers(0, 50))
    def send_a_conflicting_request(self, pick: int) -> None:
        known = self.records.acknowledged[pick % len(self.records.acknowledged)]

        async def refused() -> None:
            try:
                await known.conflicting_request(self.process)
            except IdempotencyConflict:
                return
            raise AssertionError("a conflicting request was accepted")

        self.changes_nothing(refused())

    # --- training

    @rule(fate=STEP_FATES)
    def step(self, fate: str | None) -> None:
        self.act(fate, lambda: self.process.step())

    @rule(num_scored=st.integers(2, 3), fate=STEP_FATES)
    def train_a_new_group(self, num_scored: int, fate: str | None) -> None:
        name = f"whole {next(self.serial)}"
        for index in range(3):
            self.record_sibling_call(name, index, None)
        rewards = [0.0, 1.0, 0.5][:num_scored]
        self.end_group(list(self.records.open_groups).index(name), rewards, None)
        self.step(fate)

    @rule(is_updated=st.booleans())
    def kill_the_trainer_in_a_step(self, is_updated: bool) -> None:
        def die() -> None:
            raise BackendError("lost")

        trainer = self.process.trainer
        if is_updated:
            trainer.after_step = die
        else:
            trainer.before_step = die

        async def step() -> None:
            try:
                await self.process.step()
            except BackendError:
                trainer.before_step = trainer.after_step = lambda: None
                await self.process.boot_trainer()
            trainer.before_step = trainer.after_step = lambda: None

        self.act(None, step)

    @rule(fate=fates("roll_back", "publish"))
    def lose_the_trainer(self, fate: str | None) -> None:
        self.act(fate, lambda: self.process.boot_trainer())

    @precondition(lambda self: len(self.process.journal.read(reads.checkpoints)) > 1)
    @rule(fate=fates("roll_back", "abandon"))
    def damage_the_newest_checkpoint(self, fate: str | None) -> None:
        newest = self.process.journal.read(reads.checkpoints)[0]
        (self.process.folder / "checkpoints" / newest.folder / "weights.json").write_text("[]")
        self.act(fate, lambda: self.process.boot_trainer())

    # --- the server

    @rule(is_killed=st.booleans())
    def restart_server(self, is_killed: bool) -> None:
        self.continue_with(
            self.process.restarted_after_kill(self._folder())
            if is_killed
            else self.process.restarted()
        )

    @invariant()
    def all_invariants_hold(self) -> None:
        RunInvariants(self.process, self.records).check()


TestAnyOrder = pytest.mark.slow(AnyOrder.TestCase)
# Failing examples are not shrunk, because the flushes of each try would exceed the time limit.
TestAnyOrder.settings = settings(
    max_examples=40, stateful_step_count=50, phases=set(Phase) - {Phase.shrink, Phase.explain}
)


@pytest.mark.parametrize("save_freq", [1, 2])
@pytest.mark.parametrize("point", STEP_POINTS)
def test_a_step_that_is_killed_at_any_point_is_made_once(point: str, save_freq: int) -> None:
    """Cover each crash point of a step, which random examples may miss."""
    run = AnyOrder()
    try:
        run.begin(save_freq, 2)
        for fate in (None, None, None, point, None):
            run.train_a_new_group(2, fate)
            run.all_invariants_hold()
        run.restart_server(is_killed=True)
        while run.process.steps.has_planned:
            run.step(None)
        run.all_invariants_hold()
    finally:
        run.teardown()
