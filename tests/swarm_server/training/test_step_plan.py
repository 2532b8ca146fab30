import statistics
from dataclasses import replace
from itertools import chain
from typing import cast

import pytest
from swarm_server.samples import call

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.algorithms import ESTIMATORS, NEEDS_GREEDY
from fakevllm_server.algorithms.advantage_input import AdvantageSpec, Outcome
from fakevllm_server.algorithms.loss_sequences import LossCall, call_shares
from fakevllm_server.algorithms.whitened import reinforce_plus_plus
from fakevllm_server.training.step_plan import (
    PlannedStep,
    plan_step,
    trainable_calls,
    with_excluded_counts,
)
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode
from fakevllm_server.types.number_arrays import FloatArray


def planned(rewards: list[float], **settings: object) -> PlannedStep:
    episodes = [ScoredEpisode(index, reward, [call()]) for index, reward in enumerate(rewards)]
    return plan_step(1, [FinishedGroup("g", episodes)], TrainJob.model_validate(settings))


def test_a_call_with_advantage_zero_stays_in_the_mean() -> None:
    plan = planned([1.0, 0.5, 0.0])
    assert [call.advantage == 0 for call in plan.batch.calls] == [False, True, False]
    assert plan.trained[0].siblings == [0, 1, 2]


REGULARIZERS = [{}, {"kl_loss_coef": 0.1}, {"entropy_coeff": 0.1}]


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "opo", "grpo_passk", "gpg"])
def test_a_kept_tied_group_is_in_the_loss_with_advantage_zero(
    algorithm: str, regularizer: dict[str, float]
) -> None:
    plan = planned([1.0, 1.0], algorithm=algorithm, **regularizer)
    assert plan.trained[0].siblings == [0, 1]
    assert [call.advantage for call in plan.batch.calls] == [0.0, 0.0]
    assert plan.metrics["groups_with_signal"] == 0


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_a_kept_tied_group_counts_in_the_denominators_of_the_loss(
    regularizer: dict[str, float],
) -> None:
    """The tied group has as many tokens as the other one, so each token gets half the factor."""
    job = TrainJob.model_validate(regularizer)
    mixed, tied = (
        group_of(*((reward, [call()]) for reward in rewards), name=name)
        for name, rewards in (("mixed", [1.0, 0.0]), ("tied", [0.5, 0.5]))
    )
    kept, alone = ([*scales(groups, job)] for groups in ([mixed, tied], [mixed]))
    assert kept == pytest.approx([scale / 2 for scale in alone * 2])


def scales(groups: list[FinishedGroup], job: TrainJob) -> list[float]:
    calls = plan_step(1, groups, job).batch.calls
    counted = [LossCall(call.unit, call.weight, call.num_trained) for call in calls]
    return [share.scale for share in call_shares(counted, LossSpec.of(job))]


def test_a_frozen_run_has_no_call_in_the_loss() -> None:
    plan = planned([1.0, 0.0], control="frozen", kl_loss_coef=0.1)
    assert (plan.batch.calls, plan.trained[0].siblings) == ([], [])


def test_inverted_rewards_give_the_opposite_advantages() -> None:
    episodes = [ScoredEpisode(index, float(index == 0), [call()]) for index in range(3)]
    group = FinishedGroup("g", episodes)
    plain, inverted = (
        plan_step(1, [group], TrainJob(), is_inverted=is_inverted) for is_inverted in (False, True)
    )
    ours, theirs = (
        [cast(float, one.advantage) for one in plan.batch.calls] for plan in (plain, inverted)
    )
    assert [-advantage for advantage in ours] == pytest.approx(theirs) and max(ours) > 0
    assert inverted.metrics["reward_mean"] == plain.metrics["reward_mean"]
    assert (plain.metrics.get("rewards_inverted"), inverted.metrics["rewards_inverted"]) == (
        None,
        1,
    )


def test_loss_unit_decides_whether_calls_of_an_episode_are_one_unit() -> None:
    episodes = [ScoredEpisode(index, float(index), [call(), call()]) for index in range(2)]
    group = FinishedGroup("g", episodes)
    for loss_unit, num_units, weight in (("episode", 2, 0.5), ("call", 4, 1.0)):
        job = TrainJob.model_validate({"loss_unit": loss_unit})
        calls = plan_step(1, [group], job).batch.calls
        assert len({call.unit for call in calls}) == num_units
        assert {call.weight for call in calls} == {weight}


def test_an_algorithm_with_a_baseline_of_the_whole_step_trains_tied_groups() -> None:
    assert planned([1.0, 1.0], algorithm="reinforce_plus_plus").trained[0].siblings == [0, 1]


def test_remax_compares_the_sampled_answers_with_the_greedy_answer() -> None:
    greedy = replace(call(), temperature=0.0, logprobs=None, untrainable="greedy")
    for sampled, advantage in ((1.0, 0.5), (0.5, 0.0)):
        episodes = [ScoredEpisode(0, 0.5, [greedy]), ScoredEpisode(1, sampled, [call()])]
        job = TrainJob(algorithm="remax")
        plan = plan_step(1, [FinishedGroup("g", episodes)], job)
        assert plan.trained[0].siblings == [1]
        assert [call.advantage for call in plan.batch.calls] == [advantage]


def test_the_advantage_of_each_sibling_is_reported_with_the_group() -> None:
    plan = planned([1.0, 0.0, 1.0, 0.0])
    (trained,) = plan.trained
    advantages = [call.advantage for call in plan.batch.calls]
    assert trained.siblings == [0, 1, 2, 3]
    assert trained.advantages == advantages
    assert planned([1.0, 1.0]).trained[0].advantages == [0.0, 0.0]


def test_a_step_reports_the_spread_of_rewards_advantages_and_lengths() -> None:
    metrics = planned([1.0, 0.0, 0.5]).metrics
    assert (metrics["reward_min"], metrics["reward_mean"], metrics["reward_max"]) == (0, 0.5, 1)
    assert metrics["advantage_min"] == -metrics["advantage_max"] < 0
    lengths = [metrics[f"response_length_{kind}"] for kind in ("min", "mean", "max")]
    assert lengths == [2, 2, 2]
    assert metrics["prompt_length_mean"] == 3
    assert metrics["response_length_clip_ratio"] == 0


def group_of(*episodes: tuple[float, list[RecordedCall]], name: str = "g") -> FinishedGroup:
    scored = [ScoredEpisode(at, reward, calls) for at, (reward, calls) in enumerate(episodes)]
    return FinishedGroup(name, scored)


def advantages_of(plan: PlannedStep) -> list[float]:
    return list(chain.from_iterable(call.advantages for call in plan.batch.calls))


MASKED = call(untrainable="missing_logprob", ids=(9, 9, 9))


def test_a_discount_applies_to_the_tokens_of_an_episode_across_calls() -> None:
    groups = [
        group_of((1.0, [call(ids=(5, 6)), MASKED, call(ids=(7,))]), (0.0, [call(ids=(8,))])),
    ]
    job = TrainJob(algorithm="reinforce_plus_plus", gamma=0.5)

    calls = plan_step(1, groups, job).batch.calls

    assert [len(call.response_ids) for call in calls] == [2, 1, 1]
    outcomes = [Outcome("g", 1.0, 3), Outcome("g", 0.0, 1)]
    expected = reinforce_plus_plus(outcomes, AdvantageSpec(gamma=0.5))
    assert [list(call.advantages) for call in calls] == [
        list(expected[0][:2]),
        list(expected[0][2:]),
        expected[1],
    ]
    assert len(set(expected[0])) == 3


def test_an_advantage_that_is_equal_for_all_tokens_is_one_number() -> None:
    calls = planned([1.0, 0.0], algorithm="reinforce_plus_plus").batch.calls
    assert [type(call.advantage) for call in calls] == [float, float]
    discounted = planned([1.0, 0.0], algorithm="reinforce_plus_plus", gamma=0.9).batch.calls
    assert [type(call.advantage) for call in discounted] == [FloatArray, float]


def test_penalties_of_tokens_are_subtracted_from_rewards_before_the_comparison() -> None:
    """A call that is not trained has no penalties."""
    groups = [
        group_of((1.0, [call(ids=(5, 6)), MASKED]), (1.0, [call(ids=(7,)), call(ids=(8,))])),
    ]
    job = TrainJob(algorithm="rloo", use_kl_in_reward=True, kl_coef=0.1)
    assert [list(call.response_ids) for call in trainable_calls(groups, job)] == [[5, 6], [7], [8]]

    plan = plan_step(1, groups, job, [[0.25, 0.25], [0.25], [-0.5]])

    assert advantages_of(plan) == pytest.approx([-0.75, -0.75, 0.75, 0.75])
    assert plan.metrics["reward_kl_penalty"] == pytest.approx(0.0)
    assert plan.metrics["groups_with_signal"] == 0, "the rewards alone are tied"
    assert plan.trained[0].siblings == [0, 1]
    lopsided = plan_step(1, groups, job, [[0.25, 0.35], [0.3], [0.6]])
    assert lopsided.metrics["reward_kl_penalty"] == pytest.approx(4.0)


def test_overlong_penalties_are_subtracted_before_the_comparison() -> None:
    long, longer = call(ids=(1, 2, 3)), call(ids=(1, 2, 3, 4))
    groups = [group_of((1.0, [call()]), (1.0, [call(), long]), (1.0, [longer]), name="g")]
    settings = {"max_response_length": 4, "overlong_buffer_len": 2, "overlong_penalty_factor": 0.5}
    for algorithm, expected in (
        ("rloo", [0.375, 0.0, 0.0, -0.375]),
        ("gpg", [0.25, 0.0, 0.0, -0.25]),
    ):
        job = TrainJob.model_validate(settings | {"algorithm": algorithm})
        plan = plan_step(1, groups, job)
        assert [call.advantages[0] for call in plan.batch.calls] == pytest.approx(expected)
    assert (plan.metrics["overlong"], plan.metrics["overlong_penalty"]) == (2, -0.25)
    assert (plan.metrics["reward_mean"], plan.metrics["groups_with_signal"]) == (1.0, 1)
    assert "overlong" not in plan_step(1, groups, TrainJob()).metrics


def test_shuffled_rewards_include_the_overlong_penalties() -> None:
    """A penalty is shuffled together with the reward that it was subtracted from."""
    groups = [
        group_of((0.0, [call(ids=(1, 2, 3, 4))]), (0.0, [call()]), name=f"g{at}")
        for at in range(200)
    ]
    job = TrainJob(
        algorithm="rloo", control="shuffled", max_response_length=4, overlong_buffer_len=2
    )
    calls = plan_step(1, groups, job).batch.calls
    long_advantages = [call.advantages[0] for call in calls if len(call.response_ids) == 4]
    assert set(long_advantages) == {-1.0, 1.0}
    assert abs(statistics.fmean(long_advantages)) < 0.3


def test_tie_rate_includes_ties_that_were_kept_out_of_the_step() -> None:
    metrics = {"groups": 3.0, "groups_with_signal": 2.0}
    assert with_excluded_counts(metrics, {"stale_calls": 2})["tie_rate"] == pytest.approx(1 / 3)
    metrics_with_counts = with_excluded_counts(metrics, {"stale_calls": 0, "tied_groups": 5})
    assert metrics_with_counts["tie_rate"] == pytest.approx(6 / 8)
    assert metrics_with_counts["tied_groups"] == 5


def test_a_demonstration_loss_alone_trains_only_the_answers_that_it_takes() -> None:
    plan = planned([0.5, 1.0, 0.0], loss="sft")
    assert plan.batch.calls == []
    assert [row.kind for row in plan.batch.demonstrations] == ["plain"]
    assert plan.trained[0].siblings == [1]
    assert len(plan.calls) == 1
    assert plan.metrics["tokens_trained"] == plan.calls[0].num_trained > 0

    pair = planned([0.5, 1.0, 0.0], loss="dpo")
    assert [row.kind for row in pair.batch.demonstrations] == ["chosen", "rejected"]
    assert pair.trained[0].siblings == [1, 2]


def test_beside_a_policy_loss_all_answers_train_and_the_best_is_a_demonstration_too() -> None:
    plan = planned([0.5, 1.0, 0.0], demonstration_loss="sft")
    assert plan.trained[0].siblings == [0, 1, 2]
    assert plan.batch.calls == plan.calls
    assert len(plan.batch.demonstrations) == 1
    assert not planned([0.5, 1.0, 0.0]).batch.demonstrations


@pytest.mark.parametrize("loss", ["sft", "dpo", "kto"])
def test_a_tied_group_and_a_frozen_run_give_no_demonstrations(loss: str) -> None:
    tied = planned([1.0, 1.0], loss=loss)
    assert tied.batch.demonstrations == [] and tied.trained[0].siblings == []
    frozen = planned([1.0, 0.0], loss=loss, control="frozen")
    assert frozen.batch.demonstrations == [] and frozen.trained[0].siblings == []
    beside = planned([1.0, 0.0], demonstration_loss=loss, control="frozen")
    assert beside.batch.demonstrations == []


@pytest.mark.parametrize(("loss", "kind"), [("sft", None), ("dpo", None), ("kto", "undesirable")])
def test_late_negative_feedback_trains_only_with_kto(loss: str, kind: str | None) -> None:
    sample = FinishedGroup("feedback:g/1", [ScoredEpisode(0, 0.0, [call()])], advantage=-0.5)
    plan = plan_step(1, [sample], TrainJob.model_validate({"loss": loss}))
    assert [row.kind for row in plan.batch.demonstrations] == ([] if kind is None else [kind])
    assert plan.trained[0].siblings == ([] if kind is None else [0])


def kinds_of(rewards: list[float], **settings: object) -> dict[int, str]:
    """Return the kind of each demonstration by the index of its answer, for answers of different
    lengths."""
    lengths = (10, 3, 7, 5)
    episodes = [
        ScoredEpisode(index, reward, [call(ids=tuple(range(index, index + lengths[index])))])
        for index, reward in enumerate(rewards)
    ]
    other = [ScoredEpisode(index, float(index), [call()]) for index in range(2)]
    if settings.get("algorithm") in NEEDS_GREEDY:
        greedy = replace(call(), temperature=0.0, logprobs=None, untrainable="greedy")
        for own in (episodes, other):
            mean = statistics.fmean(one.reward or 0.0 for one in own)
            own.append(ScoredEpisode(len(own), mean, [greedy]))
    groups = [FinishedGroup("g", episodes), FinishedGroup("b", other)]
    plan = plan_step(1, groups, TrainJob.model_validate(settings))
    rows = [row for row in plan.batch.demonstrations if row.group_id == "g"]
    return {row.response_ids[0]: row.kind for row in rows}


@pytest.mark.parametrize("algorithm", ESTIMATORS)
def test_no_algorithm_changes_which_answers_are_demonstrated(algorithm: str) -> None:
    def kinds(loss: str, *rewards: float) -> dict[int, str]:
        return kinds_of([*rewards], loss=loss, algorithm=algorithm)

    assert kinds("sft", 0.0, 1.0, 1.0, 1.0) == {1: "plain"}
    assert kinds("dpo", 0.5, 0.9, 0.0, 0.2) == {1: "chosen", 2: "rejected"}
    assert kinds("dpo", 0.0, 1.0, 1.0, 0.0) == {1: "chosen", 0: "rejected"}
    assert kinds("kto", 0.1, 0.2, 0.3) == {0: "undesirable", 2: "desirable"}
    assert kinds("kto", 0.7, 0.8, 0.9) == {0: "undesirable", 2: "desirable"}
    for loss in ("sft", "dpo", "kto"):
        assert kinds(loss, 0.7, 0.7, 0.7) == {}


def test_penalties_of_tokens_order_the_answers_unless_all_rewards_are_equal() -> None:
    def pair(*rewards: float) -> list[tuple[int, str]]:
        episodes = [
            ScoredEpisode(index, reward, [call(ids=(index, 9))])
            for index, reward in enumerate(rewards)
        ]
        job = TrainJob(loss="dpo", use_kl_in_reward=True, bypass_mode=False)
        penalties = [[0.3, 0.3], [0.0, 0.0], [0.0, 0.0]]
        plan = plan_step(1, [FinishedGroup("g", episodes)], job, penalties)
        return [(row.response_ids[0], row.kind) for row in plan.batch.demonstrations]

    assert pair(0.9, 0.8, 0.5) == [(1, "chosen"), (0, "rejected")]
    assert pair(0.5, 0.5, 0.5) == []
