"""Feedback samples: answers that are trained again because of a user's later feedback."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import Run
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.packed_numbers import pack_floats
from fakevllm_adapters.protocol.swarm import AddSampleRequest, CapturedCall, SiblingRef
from fakevllm_server.algorithms import ESTIMATORS
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.run.trained_token_share import coverage
from fakevllm_server.training.step_plan import PlannedStep, plan_step, with_excluded_counts
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode
from fakevllm_server.types.token_masks import TokenMasks, packed
from fakevllm_server.web.app import create_app


def group() -> FinishedGroup:
    return FinishedGroup("g", [ScoredEpisode(at, float(at), [call()]) for at in range(2)])


def sample(advantage: float = -0.75, name: str = "feedback:g/a") -> FinishedGroup:
    return FinishedGroup(name, [ScoredEpisode(0, advantage, [call()])], advantage=advantage)


def planned(*groups: FinishedGroup, **settings: object) -> PlannedStep:
    return plan_step(1, groups, TrainJob.model_validate(settings))


@pytest.mark.parametrize("algorithm", sorted(set(ESTIMATORS) - {"remax"}))
def test_a_sample_keeps_its_advantage_and_does_not_change_other_groups(algorithm: str) -> None:
    alone = planned(group(), algorithm=algorithm)
    both = planned(group(), sample(), algorithm=algorithm)
    assert both.batch.calls[: len(alone.batch.calls)] == alone.batch.calls
    assert [one.advantage for one in both.batch.calls[len(alone.batch.calls) :]] == [-0.75]
    assert [one.siblings for one in both.trained] == [alone.trained[0].siblings, [0]]
    (only,) = planned(sample(0.5), algorithm=algorithm).batch.calls
    assert only.advantage == 0.5


@pytest.mark.parametrize("control", ["frozen", "shuffled"])
def test_a_control_experiment_does_not_train_on_feedback(control: str) -> None:
    plan = planned(sample(), control=control)
    assert (plan.batch.calls, plan.trained[0].siblings) == ([], [])


def test_a_sample_is_not_counted_as_a_group() -> None:
    alone, both = planned(group()), planned(group(), sample())
    same = ("groups", "groups_with_signal", "reward_mean")
    assert [both.metrics[name] for name in same] == [alone.metrics[name] for name in same]
    assert both.metrics["feedback_samples"] == 1 and "feedback_samples" not in alone.metrics
    assert coverage([group(), sample()], both.batch.calls) == coverage([group()], alone.batch.calls)


def test_a_step_of_only_samples_reports_no_reward_and_no_ties() -> None:
    metrics = with_excluded_counts(planned(sample()).metrics, {"stale_calls": 0})
    assert "reward_mean" not in metrics and "tie_rate" not in metrics


async def test_a_step_of_only_samples_logs_its_answers_and_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fakevllm.server")
    run = Run(tmp_path, LocalBackend())
    await run.rolling()
    request = AddSampleRequest(
        sample_id="feedback:g/a", run_id="", advantage=0.5, calls=[call().to_wire()]
    )
    await run.intake.add_sample(request, [call()], None)
    run.loop.notify()
    await run.trained("feedback:g/a")
    (step_line,) = [line for line in caplog.messages if line.startswith("step ")]
    await run.stop()
    assert step_line == "step 1 → version 1: feedback on 1 answers, 2 tokens trained"


def test_a_sample_is_pooled_once_and_can_become_stale() -> None:
    pool = Pool(TrainJob(batch_size=2, max_staleness=1, filter_groups="collect"))
    first = pool.add_sample("feedback:g/a", [call()], 0.5, 3)
    assert (first.success, first.pooled, first.step) == (True, True, 3)
    assert not pool.add_sample("feedback:g/a", [call()], -0.5, 4).success
    assert pool.num_finished == 1 and not pool.is_due
    pool.add_sample("feedback:g/b", [call(version=5)], 0.5, 3)
    taken = pool.take(version=5)
    assert (taken.groups, taken.dropped) == ([], {"feedback:g/a": "stale"})


def test_a_sample_with_the_id_of_an_open_group_is_refused() -> None:
    pool = Pool(TrainJob())
    pool.add_call(SiblingRef("g", 0), call(), now=0.0)
    assert pool.add_sample("g", [call()], 0.5, 1).failure_reason == "open_group"


@pytest.mark.parametrize("closed", [None, "training_finished"])
def test_the_reply_to_a_sample_that_cannot_be_trained_has_the_reason(closed: str | None) -> None:
    pool = Pool(TrainJob(batch_size=1))
    calls = [call(untrainable="missing_logprob")] if closed is None else [call()]
    reply = pool.add_sample("feedback:g/a", calls, 0.5, 3, closed_reason=closed)
    assert (reply.success, reply.pooled) == (True, False)
    assert reply.failure_reason == closed or "missing_logprob" in reply.failure_reason
    assert pool.add_sample("feedback:g/a", [call()], 0.5, 3).success is False


def test_a_call_is_equal_after_the_wire() -> None:
    for sent in (call(version=3), replace(call(), replica="replica-1")):
        assert RecordedCall.from_wire(sent.to_wire()) == sent


@pytest.mark.parametrize(
    "changed",
    [
        {"shaped": True},
        {"logprobs": pack_floats([-0.5])},
        {"logprobs": pack_floats([-0.5, math.nan])},
        {"weight_versions": [[0, 0, 9]]},
        {"weight_versions": []},
        {"prompt_ids": ""},
        {"temperature": 0.0},
        {"response_ids": "no base64"},
    ],
)
def test_a_call_with_inconsistent_fields_is_refused(changed: dict[str, object]) -> None:
    wire = CapturedCall.model_validate(call().to_wire().model_dump() | changed)
    with pytest.raises(ValueError):
        RecordedCall.from_wire(wire)


def test_a_call_under_a_grammar_is_marked_as_shaped() -> None:
    shaped = replace(
        call(), allowed=TokenMasks.from_packed_sets([None, packed(bytes([0b1100000]))])
    )
    assert shaped.to_wire().shaped and not call().to_wire().shaped


async def test_a_sample_of_this_run_is_accepted_once_in_every_state_of_the_engine(
    tmp_path: Path,
) -> None:
    app = create_app(ServerConfig("fake", tmp_path))
    swarm = app.state.server
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def send(**changes: object) -> httpx.Response:
            fields = {"sample_id": "feedback:g/a", "run_id": swarm.run_id, "advantage": 0.5}
            body = AddSampleRequest.model_validate(
                fields | {"calls": [call().to_wire()]} | changes
            ).model_dump(mode="json")
            return await client.post("/add_sample", json=body)

        other = (await send(run_id="another")).json()
        assert (other["success"], other["failure_reason"]) == (False, "other_run")
        shaped = call().to_wire().model_copy(update={"shaped": True})
        assert (await send(calls=[shaped])).status_code == 422
        first = (await send()).json()  # the engine is offline
        assert (first["success"], first["pooled"]) == (True, True)
        assert (await send()).json() == first
        assert (await send(advantage=0.25)).status_code == 409
        swarm.job = TrainJob(batch_size=4)
        await swarm.start_engine()
        assert swarm.pool.num_finished == 1
        async with asyncio.timeout(20):
            while not swarm.engine.is_serving:
                await swarm.engine.next_move()
        assert (await send()).json() == first
        assert swarm.pool.num_finished == 1
    await swarm.close()
