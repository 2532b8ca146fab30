"""What of a step's samples is trained, and why the rest is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.run.coverage import additive_metrics, coverage, run_totals, without_update
from fakevllm_server.training.batch import plan_step
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode
from fakevllm_server.types.token_masks import TokenMasks, packed


def group(name: str, *episodes: tuple[float | None, list[RecordedCall]]) -> FinishedGroup:
    return FinishedGroup(
        name, [ScoredEpisode(at, reward, calls) for at, (reward, calls) in enumerate(episodes)]
    )


def told(*groups: FinishedGroup, job: TrainJob = TrainJob()) -> dict[str, float]:
    return coverage(groups, plan_step(1, groups, job).batch.calls)


WHOLE = group("whole", (1.0, [call()]), (0.0, [call(ids=(5, 6, 7))]))


def test_a_step_that_trains_all_it_sampled_covers_it() -> None:
    assert told(WHOLE) == {
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
def test_what_cannot_be_trained_is_counted_by_its_reason(
    lacking: RecordedCall, reason: str
) -> None:
    metrics = told(group("g", (1.0, [call(), lacking]), (0.0, [call()])))

    assert metrics["untrainable_calls"] == metrics[f"untrainable_calls_{reason}"] == 1
    assert metrics["untrainable_tokens"] == metrics[f"untrainable_tokens_{reason}"] == 2
    assert (metrics["tokens_sampled"], metrics["tokens_eligible"]) == (6, 4)
    assert metrics["sample_coverage"] == 1


def test_what_could_be_trained_and_is_not_lowers_the_coverage() -> None:
    tied = group("tied", (1.0, [call()]), (1.0, [call()]))
    unscored = group("unscored", (1.0, [call()]), (0.0, [call()]), (None, [call(ids=(1, 2, 3))]))
    metrics = told(WHOLE, tied, unscored)

    assert metrics["untrained_tokens_no_signal"] == 4
    assert metrics["untrained_tokens_no_reward"] == 3
    assert metrics["sample_coverage"] == 9 / 16


def test_a_frozen_run_covers_nothing() -> None:
    metrics = told(WHOLE, job=TrainJob(control="frozen"))
    assert (metrics["tokens_trained"], metrics["sample_coverage"]) == (0, 0)


def test_tokens_without_a_choice_are_neither_trained_nor_missed() -> None:
    few, one = packed(bytes([0b1100000])), packed(bytes([0b1000000]))
    held = replace(call(), allowed=TokenMasks.from_packed_sets([few, one]))
    metrics = told(group("g", (1.0, [held]), (0.0, [call()])))

    assert metrics["tokens_sampled"] == 4
    assert metrics["tokens_eligible"] == metrics["tokens_trained"] == 3


def test_a_step_without_an_update_trained_nothing_for_its_own_reason() -> None:
    metrics = without_update(told(WHOLE), "too_far")
    assert (metrics["tokens_trained"], metrics["untrained_tokens_too_far"]) == (0, 5)
    assert metrics["sample_coverage"] == 0


def test_counts_add_up_over_a_run_and_shares_are_made_anew() -> None:
    tied = group("tied", (1.0, [call()]), (1.0, [call(untrainable="x"), call(ids=(1, 2, 3))]))
    first, second = told(WHOLE), told(tied)
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


def test_a_run_without_a_step_missed_nothing() -> None:
    assert run_totals({}) == {"sample_coverage": 1.0}
