"""Whatever clients do, whoever dies when: what was acknowledged is trained once, waits, or is
dropped with a reason."""

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

from fakevllm_adapters.protocol.swarm import (
    AddSampleRequest,
    EndEpisodeRequest,
    EndGroupReply,
    EndGroupRequest,
    SiblingRef,
    WorkflowOutput,
)
from fakevllm_server.episodes.registry import Episode, EpisodeRefused, Idempotency
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.journal import reads
from fakevllm_server.types.backend import BackendError
from fakevllm_server.types.calls import RecordedCall
from tests.swarm_server.journal.account import Account, Acknowledged, Ask, Claim, Ended
from tests.swarm_server.journal.holds import Holds
from tests.swarm_server.journal.kills import Outcome, killed_at
from tests.swarm_server.journal.lives import JOB, Life

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
    """Where the process dies, if it does."""
    points = [f"{label}.{side}_commit" for label in labels for side in SIDES]
    return st.one_of(st.none(), st.none(), st.none(), st.sampled_from(points))


STEP_POINTS = [
    *("plan.before_commit", "plan.after_commit", "train.updated", "save.written", "save.renamed"),
    *("train.before_commit", "train.after_commit", "prune.before_commit", "prune.after_commit"),
]
STEP_FATES = st.none() | st.sampled_from(STEP_POINTS)


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.place = tempfile.TemporaryDirectory(prefix="journal-")
        self.lives = itertools.count()
        self.serial = itertools.count(1)
        self.account = Account()
        self.begun = time.monotonic()

    @initialize(save_freq=st.integers(1, 3), num_repeat=st.integers(1, 3))
    def begin(self, save_freq: int, num_repeat: int) -> None:
        own = {
            "save_freq": save_freq,
            "num_repeat": num_repeat,
            "partial_after_s": LONG_H * HOUR_S / 2,  # sweeps of claims leave tasks alone
        }
        self.life = Life(self._folder(), JOB.model_copy(update=own))
        self.run(self.life.boot_trainer())

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.close()
        self.runner.close()
        self.place.cleanup()

    # --- how things are done

    def run(self, act: Awaitable[T]) -> T:
        async def whole() -> T:
            return await act

        return self.runner.run(whole())

    def act(self, fate: str | None, act: Callable[[], Awaitable[T]]) -> Outcome[T]:
        """Done, and on disk, as far as the process lives."""

        async def whole() -> Outcome[T]:
            if fate is None:
                result = await act()
                await self.life.journal.flush()
                return Outcome(result, None, was_told=True)
            return await killed_at(self.life, fate, self._folder(), act)

        outcome = self.run(whole())
        if outcome.next_life is not None:
            self.goes_on(outcome.next_life)
        return outcome

    def has_effect(self, fate: str | None, outcome: Outcome[Any]) -> bool:
        """Whether it stands: it was told, or its change is on disk."""
        is_cut = outcome.next_life is not None and fate is not None and "before" in fate
        return outcome.was_told or not is_cut

    def goes_on(self, life: Life) -> None:
        self.life = life
        self.account.next_life()
        self.run(life.boot_trainer())

    def told(self, ask: Ask, ask_other: Ask, reply: BaseModel) -> None:
        self.account.acknowledged.append(Acknowledged(ask, ask_other, reply))

    def changes_nothing(self, act: Awaitable[T]) -> T:
        before = self.life.content()
        result = self.run(act)
        assert self.life.content() == before
        return result

    def new_call(self) -> RecordedCall:
        return call(ids=(next(self.serial), 1))

    def picked(self, pick: int) -> Claim:
        claims = list(self.account.claims.values())
        return claims[pick % len(claims)]

    def episode(self, claim: Claim) -> Episode:
        episode = self.life.intake.episodes.find_owned(claim.uuid, CLIENT)
        assert self.life.intake.episodes.find_by_key(claim.key) is episode
        return episode

    def _folder(self) -> Path:
        return Path(self.place.name) / f"{next(self.lives)}"

    # --- episodes

    @rule(
        kind=st.sampled_from(["train", "train", "eval"]), short=st.booleans(), fate=fates("claim")
    )
    def claim(self, kind: str, short: bool, fate: str | None) -> None:
        limit_s = SHORT_S if short else 1e9
        asked = Idempotency(f"asked {next(self.serial)}", b"so")
        outcome = self.act(
            fate,
            lambda: self.life.intake.claim(CLIENT, kind, limit_s, idempotency=asked),
        )
        if self.has_effect(fate, outcome):
            one = outcome.result
            known = {claim.uuid for claim in self.account.lapsed}
            assert one.uuid not in known | set(self.account.claims) | set(self.account.ended)
            self.account.claimed(Claim(one.episode_id, one.uuid, one.key, kind, short, asked))
        else:
            assert self.asked_again(asked) is None

    def asked_again(self, asked: Idempotency) -> Episode | None:
        return self.changes_nothing(self.life.intake.renew_claim(CLIENT, "", asked))

    @precondition(lambda self: self.account.claims)
    @rule(pick=PICK)
    def claim_again(self, pick: int) -> None:
        claim = self.picked(pick)
        assert self.asked_again(claim.asked_with) is self.episode(claim)
        claim.renewed_at_h = 0

    @precondition(lambda self: self.account.lapsed or self.account.ended)
    @rule(pick=PICK)
    def claim_again_what_is_over(self, pick: int) -> None:
        over = self.account.lapsed + [one.claim for one in self.account.ended.values()]
        claim = over[pick % len(over)]
        assert self.asked_again(claim.asked_with) is None

    @precondition(lambda self: self.account.claims)
    @rule(pick=PICK, fate=fates("call"))
    def call_of_an_episode(self, pick: int, fate: str | None) -> None:
        claim, one = self.picked(pick), self.new_call()
        episode = self.episode(claim)
        outcome = self.act(fate, lambda: self.life.intake.add_episode_call(episode, one))
        if self.has_effect(fate, outcome):
            claim.calls.append(one)

    @precondition(lambda self: self.account.claims)
    @rule(pick=PICK, at_h=st.integers(1, 3))
    def renew(self, pick: int, at_h: int) -> None:
        self.renewed(self.picked(pick), at_h)

    def renewed(self, claim: Claim, at_h: int) -> None:
        self.life.intake.episodes.renew(self.episode(claim), self.begun + at_h * HOUR_S)
        claim.renewed_at_h = at_h

    @rule(at_h=st.integers(1, 4), fate=fates("reopen"))
    def sweep(self, at_h: int, fate: str | None) -> None:
        ran_out = self.account.ran_out(at_h)

        async def sweep() -> None:
            self.life.intake.sweep(self.begun + at_h * HOUR_S)

        outcome = self.act(fate, sweep)
        # Nobody is told that his claim ran out, so it may live on after a kill.
        is_cut = outcome.next_life is not None and fate == "reopen.before_commit"
        for claim in [] if is_cut else ran_out:
            self.account.lapse(claim)

    @rule(fate=fates("complete"))
    def the_others_of_a_task_stay_away(self, fate: str | None) -> None:
        for claim in self.account.claims.values():
            self.renewed(claim, LONG_H)
        waiting: defaultdict[str | None, set[str]] = defaultdict(set)
        for sample, _ in self.life.waiting().samples:
            waiting[sample.task_id].add(sample.owner)

        async def sweep() -> None:
            self.life.intake.sweep(self.begun)
            self.life.intake.sweep(self.begun + LONG_H * HOUR_S)

        outcome = self.act(fate, sweep)
        self.account.left |= {frozenset(owners) for owners in waiting.values()}
        if outcome.next_life is None:
            assert not self.life.waiting().samples

    @precondition(lambda self: self.account.claims)
    @rule(pick=PICK, task=st.sampled_from(TASKS), reward=REWARDS, fate=fates("end_episode"))
    def end_episode(self, pick: int, task: str, reward: float, fate: str | None) -> None:
        claim = self.picked(pick)

        def asks(reward: float) -> Ask:
            end = EndEpisodeRequest(
                client_uuid=CLIENT,
                episode_uuid=claim.uuid,
                task_id=task,
                workflow_output=WorkflowOutput(reward=reward, metadata={"task_id": task}),
            )
            return lambda life: life.intake.end_episode(end, reward, None)

        ask = asks(reward)
        outcome = self.act(fate, lambda: ask(self.life))
        if self.has_effect(fate, outcome):
            self.account.end(Ended(claim, task, reward))
            self.told(ask, asks(0.25), outcome.result)

    @precondition(lambda self: self.account.claims)
    @rule(pick=PICK, fate=fates("reopen"))
    def abort_episode(self, pick: int, fate: str | None) -> None:
        claim = self.picked(pick)
        outcome = self.act(fate, lambda: self.life.intake.abort_episode(claim.uuid, CLIENT))
        if self.has_effect(fate, outcome):
            self.account.lapse(claim)

    @rule(task=st.sampled_from(TASKS), reward=REWARDS)
    def a_whole_episode(self, task: str, reward: float) -> None:
        self.claim("train", False, None)
        last = len(self.account.claims) - 1
        self.call_of_an_episode(last, None)
        self.end_episode(last, task, reward, None)

    @precondition(lambda self: self.account.lapsed)
    @rule(pick=PICK)
    def an_older_epoch(self, pick: int) -> None:
        claim = self.account.lapsed[pick % len(self.account.lapsed)]
        end = EndEpisodeRequest(client_uuid=CLIENT, episode_uuid=claim.uuid, task_id="t0")
        late = Episode(claim.episode_id, 1, claim.key, CLIENT, claim.kind, SHORT_S, 0.0)

        async def comes_late() -> None:
            assert self.life.intake.episodes.find_by_key(claim.key) is None
            assert self.life.intake.episodes.find(claim.uuid) is None
            await self.life.intake.add_episode_call(late, self.new_call())
            await self.life.intake.abort_episode(claim.uuid, CLIENT)
            try:
                await self.life.intake.end_episode(end, 1.0, None)
            except EpisodeRefused:
                return
            raise AssertionError("an older epoch was ended")

        self.changes_nothing(comes_late())

    # --- groups

    @rule(name=st.sampled_from(GROUPS), index=st.integers(0, 2), fate=fates("call"))
    def call_of_a_sibling(self, name: str, index: int, fate: str | None) -> None:
        one = self.new_call()
        outcome = self.act(fate, lambda: self.life.intake.add_call(SiblingRef(name, index), one))
        if self.has_effect(fate, outcome):
            self.account.capture(name, index, one)

    @precondition(lambda self: self.account.open_groups)
    @rule(pick=PICK, rewards=st.lists(REWARDS, min_size=2, max_size=3), fate=fates("end_group"))
    def end_group(self, pick: int, rewards: list[float], fate: str | None) -> None:
        names = list(self.account.open_groups)
        name = names[pick % len(names)]
        if not any(self.account.open_groups[name].get(index) for index in range(len(rewards))):
            return  # nothing that is scored could be trained

        def asks(rewards: list[float]) -> Ask:
            end = EndGroupRequest(group_id=name, rewards=list(rewards))
            return lambda life: life.intake.end_group(end, None)

        ask = asks(rewards)
        outcome = self.act(fate, lambda: ask(self.life))
        reply = outcome.result
        assert isinstance(reply, EndGroupReply) and reply.pooled
        if self.has_effect(fate, outcome):
            self.account.end_group(name, len(rewards))
            told = [[one.to_wire() for one in calls] for calls in self._calls_of(name)]
            assert reply.calls == told
            self.told(ask, asks([*rewards, 0.0]), reply)

    @rule(name=st.sampled_from(GROUPS), fate=fates("abort_group"))
    def abort_group(self, name: str, fate: str | None) -> None:
        async def abort() -> None:
            await self.life.intake.abort_group(name)

        if self.has_effect(fate, self.act(fate, abort)):
            self.account.abort_group(name)

    @rule(number=st.integers(0, 3), advantage=REWARDS, fate=fates("end_group"))
    def add_sample(self, number: int, advantage: float, fate: str | None) -> None:
        name = f"s{number}"
        if name in self.account.ended_groups:
            return  # asked again elsewhere
        one = self.new_call()

        def asks(advantage: float) -> Ask:
            told = AddSampleRequest(
                sample_id=name, run_id="r", advantage=advantage, calls=[one.to_wire()]
            )
            return lambda life: life.intake.add_sample(told, [one], None)

        ask = asks(advantage)
        outcome = self.act(fate, lambda: ask(self.life))
        if self.has_effect(fate, outcome):
            self.account.ended_groups[name] = {0: [one]}
            self.told(ask, asks(0.25), outcome.result)

    def _calls_of(self, name: str) -> list[list[RecordedCall]]:
        return list(self.account.ended_groups[name].values())

    # --- again

    @precondition(lambda self: self.account.acknowledged)
    @rule(pick=st.integers(0, 50))
    def the_same_again(self, pick: int) -> None:
        known = self.account.acknowledged[pick % len(self.account.acknowledged)]
        again = self.changes_nothing(known.ask(self.life))
        # The calls of a group are told as far as they are kept.
        left_out = {"calls"} if isinstance(again, EndGroupReply) else set[str]()
        assert again.model_dump(exclude=left_out) == known.reply.model_dump(exclude=left_out)

    @precondition(lambda self: self.account.acknowledged)
    @rule(pick=st.integers(0, 50))
    def other_words_under_the_same_name(self, pick: int) -> None:
        known = self.account.acknowledged[pick % len(self.account.acknowledged)]

        async def refused() -> None:
            try:
                await known.ask_other(self.life)
            except IdempotencyConflict:
                return
            raise AssertionError("what was acknowledged was taken back")

        self.changes_nothing(refused())

    # --- training

    @rule(fate=STEP_FATES)
    def step(self, fate: str | None) -> None:
        self.act(fate, lambda: self.life.step())

    @rule(num_scored=st.integers(2, 3), fate=STEP_FATES)
    def a_whole_group(self, num_scored: int, fate: str | None) -> None:
        name = f"whole {next(self.serial)}"
        for index in range(3):
            self.call_of_a_sibling(name, index, None)
        rewards = [0.0, 1.0, 0.5][:num_scored]
        self.end_group(list(self.account.open_groups).index(name), rewards, None)
        self.step(fate)

    @rule(is_updated=st.booleans())
    def the_trainer_dies_in_a_step(self, is_updated: bool) -> None:
        def die() -> None:
            raise BackendError("lost")

        trainer = self.life.trainer
        if is_updated:
            trainer.after = die
        else:
            trainer.before = die

        async def step() -> None:
            try:
                await self.life.step()
            except BackendError:
                trainer.before = trainer.after = lambda: None
                await self.life.boot_trainer()
            trainer.before = trainer.after = lambda: None

        self.act(None, step)

    @rule(fate=fates("roll_back", "publish"))
    def the_trainer_is_lost(self, fate: str | None) -> None:
        self.act(fate, lambda: self.life.boot_trainer())

    @precondition(lambda self: len(self.life.journal.read(reads.checkpoints)) > 1)
    @rule(fate=fates("roll_back", "abandon"))
    def the_newest_checkpoint_is_damaged(self, fate: str | None) -> None:
        newest = self.life.journal.read(reads.checkpoints)[0]
        (self.life.folder / "checkpoints" / newest.folder / "weights.json").write_text("[]")
        self.act(fate, lambda: self.life.boot_trainer())

    # --- the server

    @rule(is_killed=st.booleans())
    def the_next_life(self, is_killed: bool) -> None:
        self.goes_on(self.life.killed(self._folder()) if is_killed else self.life.next())

    @invariant()
    def all_holds(self) -> None:
        Holds(self.life, self.account).check()


TestAnyOrder = AnyOrder.TestCase
# Not made smaller: every try costs its flushes to disk, and the test its limit.
TestAnyOrder.settings = settings(
    max_examples=40, stateful_step_count=50, phases=set(Phase) - {Phase.shrink, Phase.explain}
)


@pytest.mark.parametrize("save_freq", [1, 2])
@pytest.mark.parametrize("point", STEP_POINTS)
def test_a_step_that_is_cut_at_any_point_is_made_once(point: str, save_freq: int) -> None:
    """What chance may leave out."""
    run = AnyOrder()
    try:
        run.begin(save_freq, 2)
        for fate in (None, None, None, point, None):
            run.a_whole_group(2, fate)
            run.all_holds()
        run.the_next_life(is_killed=True)
        while run.life.steps.has_planned:
            run.step(None)
        run.all_holds()
    finally:
        run.teardown()
