"""Forced tokens, whose allowed set had one element: they are not trained."""

from __future__ import annotations

from dataclasses import replace

from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.algorithms.advantage_input import AdvantageSpec, Outcome
from fakevllm_server.algorithms.whitened import reinforce_plus_plus
from fakevllm_server.training.step_plan import PlannedStep, plan_step
from fakevllm_server.types.backend import Call
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode
from fakevllm_server.types.token_masks import TokenMasks, packed

ONE, TWO = packed(bytes([0b100])), packed(bytes([0b1100]))


def constrained_call(*allowed_sets: bytes | None) -> RecordedCall:
    plain = call(ids=tuple(range(2, 2 + len(allowed_sets))))
    return replace(plain, allowed=TokenMasks.from_packed_sets(allowed_sets))


def planned(job: TrainJob) -> PlannedStep:
    """Plan a step with five free tokens in the first episode and one in the second."""
    first = [constrained_call(ONE, TWO, None, ONE), call(ids=(5, 6)), constrained_call(None, ONE)]
    episodes = [
        ScoredEpisode(0, 1.0, first),
        ScoredEpisode(1, 0.0, [constrained_call(ONE, ONE, TWO)]),
    ]
    return plan_step(1, [FinishedGroup("g", episodes)], job)


def test_forced_tokens_have_no_advantage_and_are_not_in_the_estimate() -> None:
    calls = planned(TrainJob(algorithm="reinforce_plus_plus", gamma=0.5)).batch.calls
    outcomes = [Outcome("g", 1.0, 5), Outcome("g", 0.0, 1)]
    of_first, of_second = reinforce_plus_plus(outcomes, AdvantageSpec(gamma=0.5))
    assert [list(one.advantages) for one in calls] == [
        list(of_first[:2]),
        list(of_first[2:4]),
        list(of_first[4:]),
        of_second,
    ]


def test_forced_tokens_are_counted_separately() -> None:
    plan = planned(TrainJob())
    assert (plan.metrics["tokens_trained"], plan.metrics["tokens_forced"]) == (6, 5)
    assert [one.is_trained for one in plan.batch.calls] == [
        [False, True, True, False],
        [True, True],
        [True, False],
        [False, False, True],
    ]


def test_allowed_token_sets_are_sent_to_the_trainer() -> None:
    for one in planned(TrainJob()).batch.calls:
        assert Call.from_wire(one.to_wire()) == replace(one, logprobs=list(one.logprobs))
