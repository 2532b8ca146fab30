"""Coverage: the share of a step's tokens that is trained, and the reasons for the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.run.trained_token_share import (
    additive_metrics,
    coverage,
    run_totals,
    without_update,
)
from fakevllm_server.training.step_plan import plan_step
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode
from fakevllm_server.types.token_masks import TokenMasks, packed


def group(name: str, *episodes: tuple[float | None, list[RecordedCall]]) -> FinishedGroup:
    return FinishedGroup(
        name, [ScoredEpisode(at, reward, calls) for at, (reward, calls) in enumerate(episodes)]
    )


def step_coverage(*groups: FinishedGroup, job: TrainJob = TrainJob()) -> dict[str, float]:
    return coverage(groups, plan_step(1, groups, job).batch.calls)


TRAINED = group("whole", (1.0, [call()]), (0.0, [call(ids=(5, 6, 7))]))


def test_the_coverage_is_1_if_all_tokens_are_trained() -> None:
    assert step_coverage(TRAINED) == {
        "tokens_sampled": 5,
        "tokens_eligible": 5,
        "tokens_trained": 5,
        "untrainable_calls": 0,
        "untrainable_tokens": 0,
        "untrained_tokens_no_reward": 0,
        "untrained_tokens_no_signal": 0,
        "sample_coverage": 1.0,
    }


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        (replace(call(), logprobs=None), "missing_logprob"),
        (replace(call(), logprobs=[-0.5]), "missing_logprob"),
        (call(untrainable="missing_logprob"), "missing_logprob"),
        (
            call(untrainable="sampling_not_trainable: top_p, min_p"),
            "sampling_not_trainable",
        ),
        (call(untrainable="vLLM 0.20 has no token ids!"), "vllm_0_20_has_no_token_ids"),
    ],
)
def test_untrainable_calls_are_counted_by_reason(lacking: RecordedCall, reason: str) -> None:
    metrics = step_coverage(group("g", (1.0, [call(), lacking]), (0.0, [call()])))

    assert metrics["untrainable_calls"] == metrics[f"untrainable_calls_{reason}"] == 1
    assert metrics["untrainable_tokens"] == metrics[f"untrainable_tokens_{reason}"] == 2
    assert (metrics["tokens_sampled"], metrics["tokens_eligible"]) == (6, 4)
    assert metrics["sample_coverage"] == 1


def test_only_tokens_that_are_not_in_the_loss_lower_the_coverage() -> None:
    """The tokens of a tied group are in the loss, with advantage 0."""
    tied = group("tied", (1.0, [call()]), (1.0, [call()]))
    unscored = group("unscored", (1.0, [call()]), (0.0, [call()]), (None, [call(ids=(1, 2, 3))]))
    metrics = step_coverage(TRAINED, tied, unscored)

    assert metrics["untrained_tokens_no_signal"] == 0
    assert metrics["untrained_tokens_no_reward"] == 3
    assert metrics["sample_coverage"] == 13 / 16


def test_the_coverage_of_a_frozen_run_is_0() -> None:
    metrics = step_coverage(TRAINED, job=TrainJob(control="frozen"))
    assert (metrics["tokens_trained"], metrics["sample_coverage"]) == (0, 0)
    assert metrics["untrained_tokens_no_signal"] == metrics["tokens_eligible"] == 5


def test_forced_tokens_are_neither_eligible_nor_trained() -> None:
    few, one = packed(bytes([0b1100000])), packed(bytes([0b1000000]))
    held = replace(call(), allowed=TokenMasks.from_packed_sets([few, one]))
    metrics = step_coverage(group("g", (1.0, [held]), (0.0, [call()])))

    assert metrics["tokens_sampled"] == 4
    assert metrics["tokens_eligible"] == metrics["tokens_trained"] == 3


def test_a_step_without_an_update_has_no_trained_tokens_and_a_reason() -> None:
    metrics = without_update(step_coverage(TRAINED), "too_far")
    assert (metrics["tokens_trained"], metrics["untrained_tokens_too_far"]) == (0, 5)
    assert metrics["sample_coverage"] == 0


def test_counts_are_summed_over_a_run_and_ratios_are_recomputed() -> None:
    tied = group("tied", (1.0, [call()]), (1.0, [call(untrainable="x"), call(ids=(1, 2, 3))]))
    first, second = step_coverage(TRAINED), step_coverage(tied, job=TrainJob(control="frozen"))
    added = additive_metrics(first | {"reward_mean": 0.5, "branch_rate": 0.5, "branch_first": 1.0})
    for name, value in additive_metrics(
        second | {"branch_unknown": 1.0, "branch_extends": 3.0}
    ).items():
        added[name] = added.get(name, 0) + value
    run = run_totals(added)

    assert "reward_mean" not in run and run["untrainable_tokens_x"] == 2
    assert (run["tokens_sampled"], run["tokens_trained"]) == (12, 5)
    assert run["sample_coverage"] == 5 / 10
    assert run["branch_rate"] == 1 / 4


def test_the_coverage_of_a_run_without_steps_is_1() -> None:
    assert run_totals({}) == {"sample_coverage": 1.0}
