from dataclasses import replace

import pytest
from swarm_server.samples import call

from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.batch import PlannedStep, plan_step
from fakevllm_server.calls import FinishedGroup, ScoredEpisode


def planned(rewards: list[float], **settings: object) -> PlannedStep:
    episodes = [ScoredEpisode(index, reward, [call()]) for index, reward in enumerate(rewards)]
    return plan_step(1, [FinishedGroup("g", episodes)], TrainJob.model_validate(settings))


def test_a_call_of_advantage_zero_stays_in_the_mean() -> None:
    plan = planned([1.0, 0.5, 0.0])
    assert [call.advantage == 0 for call in plan.batch.calls] == [False, True, False]
    assert plan.trained[0].siblings == [0, 1, 2]


@pytest.mark.parametrize(("kl_loss_coef", "siblings"), [(0.0, []), (0.1, [0, 1])])
def test_a_tied_group_is_in_the_loss_only_where_the_kl_term_is(
    kl_loss_coef: float, siblings: list[int]
) -> None:
    plan = planned([1.0, 1.0], kl_loss_coef=kl_loss_coef)
    assert plan.trained[0].siblings == siblings
    assert len(plan.batch.calls) == len(siblings)


def test_nothing_of_a_frozen_run_is_in_a_loss() -> None:
    plan = planned([1.0, 0.0], control="frozen", kl_loss_coef=0.1)
    assert (plan.batch.calls, plan.trained[0].siblings) == ([], [])


def test_calls_of_an_episode_are_one_unit_of_the_loss_or_several() -> None:
    episodes = [ScoredEpisode(index, float(index), [call(), call()]) for index in range(2)]
    group = FinishedGroup("g", episodes)
    for loss_unit, num_units, weight in (("episode", 2, 0.5), ("call", 4, 1.0)):
        job = TrainJob.model_validate({"loss_unit": loss_unit})
        calls = plan_step(1, [group], job).batch.calls
        assert len({call.unit for call in calls}) == num_units
        assert {call.weight for call in calls} == {weight}


def test_an_algorithm_that_compares_with_the_whole_step_trains_tied_groups_too() -> None:
    assert planned([1.0, 1.0], algorithm="reinforce_plus_plus").trained[0].siblings == [0, 1]


def test_remax_trains_what_differs_from_the_greedy_answer_and_no_ties() -> None:
    greedy = replace(call(), temperature=0.0, logprobs=None, untrainable="greedy")
    for sampled, siblings in ((1.0, [1]), (0.5, [])):
        episodes = [ScoredEpisode(0, 0.5, [greedy]), ScoredEpisode(1, sampled, [call()])]
        job = TrainJob(algorithm="remax")
        plan = plan_step(1, [FinishedGroup("g", episodes)], job)
        assert plan.trained[0].siblings == siblings
        assert [call.advantage for call in plan.batch.calls] == [0.5] * len(siblings)
