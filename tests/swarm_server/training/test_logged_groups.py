"""Groups of an earlier run, which are trained again: weights, limits, journal and route."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Run
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import (
    AddLoggedGroupReply,
    AddLoggedGroupRequest,
    CapturedCall,
    SiblingRef,
)
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.training.logged_groups import weigh_logged_calls
from fakevllm_server.training.reward_kl import reward_penalties
from fakevllm_server.training.step_plan import plan_step
from fakevllm_server.types.backend import Batch
from fakevllm_server.types.calls import (
    LOGGED_VERSION,
    FinishedGroup,
    RecordedCall,
    ScoredEpisode,
)
from fakevllm_server.web.app import create_app

YES, NO = (ord("y"), 2), (ord("n"), 2)


def logged(ids: tuple[int, ...] = YES, log_prob: float = math.log(0.5)) -> RecordedCall:
    """Return a logged call of the fake engine. `log_prob` is the one of its first token."""
    return replace(call(LOGGED_VERSION, ids=ids), logprobs=[log_prob, 0.0], finish_reason="stop")


def request(name: str = "g", *rewards: float | None) -> AddLoggedGroupRequest:
    calls = [[logged(YES).to_wire()], [logged(NO).to_wire()]]
    return AddLoggedGroupRequest(group_id=name, rewards=list(rewards or (1.0, 0.0)), calls=calls)


async def add(run: Run[LocalBackend], name: str, *calls: RecordedCall) -> AddLoggedGroupReply:
    own = [[one] for one in calls or (logged(YES), logged(NO))]
    reply = await run.intake.add_logged_group(request(name), own, run.loop.closed_reason)
    run.loop.notify()
    return reply


def test_a_logged_call_gets_a_version_that_no_run_has_and_no_replica() -> None:
    recorded = RecordedCall.from_log(replace(call(version=7), replica="replica-0").to_wire())
    assert recorded.version == LOGGED_VERSION
    assert replace(recorded, versions=call().versions) == call()


def test_a_logged_call_under_a_grammar_is_not_trained() -> None:
    shaped = call().to_wire().model_copy(update={"shaped": True})
    assert "no_token_sets" in (RecordedCall.from_log(shaped).untrainable or "")


def test_a_logged_group_never_becomes_stale_and_says_when_a_step_is_due() -> None:
    pool = Pool(TrainJob(batch_size=2, max_staleness=0))
    replies = [
        pool.add_logged_group(name, [1.0, 0.0], [[logged()], [logged()]], 3) for name in "ab"
    ]
    assert [(one.pooled, one.is_due, one.step) for one in replies] == [
        (True, False, 3),
        (True, True, 3),
    ]
    taken = pool.take(version=1_000)
    assert ([group.group_id for group in taken.groups], taken.dropped) == (["a", "b"], {})
    again = pool.add_logged_group("a", [1.0, 0.0], [[logged()], [logged()]], 3)
    assert not again.success


def test_a_sibling_without_calls_counts_in_the_baseline() -> None:
    pool = Pool(TrainJob(batch_size=1))
    assert pool.add_logged_group("g", [1.0, 0.0, 0.0], [[logged()]], 1).pooled
    (group,) = pool.take(version=0).groups
    assert (group.rewards, [len(one.calls) for one in group.episodes]) == (
        [1.0, 0.0, 0.0],
        [1, 0, 0],
    )


def test_an_open_group_with_the_same_id_is_refused() -> None:
    pool = Pool(TrainJob())
    pool.add_call(SiblingRef("g", 0), call(), now=0.0)
    assert pool.add_logged_group("g", [1.0, 0.0], [], 1).failure_reason == "open_group"


async def test_logged_calls_are_weighed_and_other_calls_stay_unchanged() -> None:
    engine = LocalBackend()  # gives the first token of both answers the probability p
    fresh = [replace(call(ids=ids), logprobs=[math.log(0.5), 0.0]) for ids in (YES, NO)]
    old = [logged(YES, math.log(0.1)), logged(NO, math.log(0.8))]
    groups = [
        FinishedGroup(name, [ScoredEpisode(i, float(i), [one]) for i, one in enumerate(calls)])
        for name, calls in (("fresh", fresh), ("old", old))
    ]
    batch = plan_step(1, groups, TrainJob()).batch
    job = TrainJob(logged_weight_bound=2.0)
    weighed = await weigh_logged_calls(engine, batch, job)
    assert weighed.batch.calls[:2] == batch.calls[:2]
    current = await engine.log_probs(batch.calls, "trained")
    for before, after, now in zip(
        batch.calls[2:], weighed.batch.calls[2:], current[2:], strict=True
    ):
        weights = [min(math.exp(a - b), 2.0) for a, b in zip(now, before.logprobs, strict=True)]
        assert list(after.advantages) == pytest.approx(
            [a * w for a, w in zip(before.advantages, weights, strict=True)]
        )
        assert list(after.logprobs) == now
    assert weighed.metrics["logged_tokens"] == 4
    assert weighed.metrics["logged_truncated"] == 0.25


async def test_the_kl_penalty_of_logged_calls_is_that_of_the_weights_before_the_step() -> None:
    engine = LocalBackend()
    episodes = [ScoredEpisode(0, 1.0, [logged(YES, math.log(0.01))]), ScoredEpisode(1, 0.0, [])]
    fresh = ScoredEpisode(2, 0.0, [replace(call(ids=NO), logprobs=[math.log(0.7), 0.0])])
    groups = [FinishedGroup("g", [*episodes, fresh])]
    of_trainer, reported = [
        await reward_penalties(
            engine, groups, TrainJob(use_kl_in_reward=True, bypass_mode=bypass_mode)
        )
        for bypass_mode in (False, True)
    ]
    assert of_trainer is not None and reported is not None
    assert reported[0] == of_trainer[0]
    assert reported[1] != of_trainer[1]  # the engine's log-probability of a call of this run


async def test_a_token_that_has_become_impossible_has_the_weight_0_and_keeps_its_log_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def impossible(*_: object) -> list[list[float]]:
        return [[-math.inf, 0.0]]

    engine = LocalBackend()
    monkeypatch.setattr(engine, "log_probs", impossible)
    episodes = [ScoredEpisode(0, 1.0, [logged()]), ScoredEpisode(1, 0.0, [])]
    batch = plan_step(1, [FinishedGroup("g", episodes)], TrainJob()).batch
    (weighed,) = (await weigh_logged_calls(engine, batch, TrainJob())).batch.calls
    assert weighed.advantages[0] == 0.0 != weighed.advantages[1]
    assert list(weighed.logprobs) == [math.log(0.5), 0.0]


async def test_a_batch_without_logged_calls_asks_the_trainer_nothing() -> None:
    engine = LocalBackend()
    batch = Batch(1, [])
    weighed = await weigh_logged_calls(engine, batch, TrainJob())
    assert (weighed.batch is batch, weighed.metrics, engine.log_prob_policies) == (True, {}, [])


async def test_a_step_of_logged_groups_trains_with_its_metrics(tmp_path: Path) -> None:
    run = Run(tmp_path, LocalBackend())
    await run.rolling()
    reply = await add(run, "g")
    assert reply.pooled and reply.is_due
    await run.trained("g")
    (step,) = [entry for entry in run.log.entries_after(0) if entry.kind == "step"]
    await run.stop()
    assert run.backend.steps == [1]
    assert step.metrics["logged_ess"] > 0.5 and step.metrics["logged_tokens"] == 4


async def test_a_step_below_the_limit_makes_no_update(tmp_path: Path) -> None:
    job = JOB.model_copy(update={"min_logged_ess": 0.9})
    run = Run(tmp_path, LocalBackend(), job)
    await run.rolling()
    # One of four tokens has a weight near 0, and the others have 1 or 2.
    await add(run, "g", logged(YES, math.log(0.1)), logged(NO, 0.0))
    await run.until(lambda: "g" in run.trained_groups)
    (step,) = [entry for entry in run.log.entries_after(0) if entry.kind == "step"]
    await run.stop()
    assert run.backend.steps == []
    assert (step.metrics["no_update"], step.metrics["low_ess"]) == (1, 1)
    assert step.metrics["untrained_tokens_low_ess"] == 4 and step.metrics["tokens_trained"] == 0
    assert [group.siblings for group in step.groups] == [[]]


async def test_a_logged_group_survives_a_crash_before_its_step(tmp_path: Path) -> None:
    first = Run(tmp_path, LocalBackend(), JOB.model_copy(update={"batch_size": 2}))
    await first.rolling()
    await add(first, "g")
    await first.stop()
    second = Run(tmp_path, LocalBackend(), JOB.model_copy(update={"batch_size": 2}))
    (group,) = second.pool.finished
    calls = [list(episode.calls) for episode in group.episodes]
    assert calls == [[logged(YES)], [logged(NO)]]
    await second.rolling()
    await add(second, "h")
    await second.trained("g")
    await second.trained("h")
    await second.stop()


async def test_the_route_accepts_a_group_once_and_refuses_broken_calls(tmp_path: Path) -> None:
    app = create_app(ServerConfig("fake", tmp_path))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def send(body: AddLoggedGroupRequest) -> httpx.Response:
            return await client.post("/add_logged_group", json=body.model_dump(mode="json"))

        broken = CapturedCall.model_validate(call().to_wire().model_dump() | {"prompt_ids": ""})
        body = request().model_copy(update={"calls": [[broken]]})
        assert (await send(body)).status_code == 422
        first = (await send(request())).json()
        assert (first["success"], first["pooled"]) == (True, True)
        assert (await send(request())).json() == first
        assert (await send(request("g", 0.0, 1.0))).status_code == 409
        assert app.state.server.pool.num_finished == 1
    await asyncio.wait_for(app.state.server.close(), 20)
