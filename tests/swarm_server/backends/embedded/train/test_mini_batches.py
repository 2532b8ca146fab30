"""Steps with several mini-batches on the embedded trainer, compared with one step for each of the
mini-batches."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import (
    CUT_DEPENDENT_METRICS,
    finish,
    random_calls,
    weights,
)
from swarm_server.backends.embedded.lora_helpers import LORA, new_trainer
from swarm_server.backends.embedded.train.demonstration_steps import (
    KINDS_OF_LOSS,
    demonstrations_for,
)

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.torch_losses import LOSSES
from fakevllm_server.backends.training.failed_step import PartialStep
from fakevllm_server.backends.training.mini_batches import mini_batches
from fakevllm_server.backends.training.step_updates import UPDATES_MADE
from fakevllm_server.types.backend import Batch, Call, LossSpec, StepMetrics

QUICK: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
BATCH_NORMALIZED = {"rollout_is": "token", "rollout_is_batch_normalize": True}


def job_of(**settings: Any) -> TrainJob:
    """Return a job without a mismatch limit, because made-up calls are far from any model. A job of
    demonstrations alone cannot set the limit."""
    unlimited = {} if settings.get("loss") in KINDS_OF_LOSS else {"max_mismatch_k3": None}
    return TrainJob.model_validate(QUICK | unlimited | settings)


def grouped_calls(num_groups: int = 5, seed: int = 0) -> list[Call]:
    """Create two episodes with two calls each for every group, in mixed order. The calls of a group
    begin with the same tokens."""
    rng = random.Random(seed)
    calls: list[Call] = []
    for at, call in enumerate(random_calls(4 * num_groups, seed)):
        group, episode = f"g{at // 4}", f"g{at // 4} {at // 2}"
        prompt = [*range(50, 58 + at // 4), *call.prompt_ids]
        calls.append(replace(call, group_id=group, unit=episode, prompt_ids=prompt, weight=0.5))
    rng.shuffle(calls)
    return calls


def step(trainer: PolicyTrainer, job: TrainJob, batch: Batch) -> StepMetrics:
    trainer.boot(job)
    return finish(trainer.step(batch, LossSpec.of(job)))


def with_log_probs(trainer: PolicyTrainer, calls: Sequence[Call]) -> list[Call]:
    """Return the calls as if the trainer's present weights had sampled them."""
    rows = finish(trainer.log_probs(calls, "trained"))
    return [replace(call, logprobs=row) for call, row in zip(calls, rows, strict=True)]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="token-mean"),
        pytest.param({"loss_agg_mode": "seq-mean-token-mean"}, id="seq-mean-token-mean"),
        pytest.param({"loss_agg_mode": "seq-mean-token-sum-norm"}, id="seq-mean-token-sum-norm"),
        pytest.param({"loss": "gspo", "micro_batch_tokens": 40}, id="split-units"),
        pytest.param(BATCH_NORMALIZED | {"loss": "gpg", "micro_batch_tokens": 60}, id="split-step"),
        pytest.param({"forest": False, "entropy_coeff": 0.01}, id="rows"),
        pytest.param(LORA | {"kl_loss_coef": 0.5, "lr": 1e-2}, id="lora"),
        pytest.param({"loss": "sft"}, id="sft"),
        pytest.param({"loss": "dpo"}, id="dpo"),
        pytest.param({"loss": "kto", "micro_batch_tokens": 60}, id="kto"),
        pytest.param({"demonstration_loss": "sft"}, id="policy-and-sft"),
    ],
)
def test_a_step_makes_the_updates_of_one_step_for_each_mini_batch_and_epoch(
    tiny_folder: Path, settings: dict[str, Any]
) -> None:
    """With `bypass_mode`, the log-probabilities of the old policy are those of the engine, so they
    are the same in all steps."""
    job = job_of(**settings)
    shown = LossSpec.of(job).of_demonstrations
    batch = Batch(1, grouped_calls(), 0, demonstrations_for(shown) if shown else ())
    if job.loss == shown:
        batch = replace(batch, calls=[])
    together, apart = new_trainer(tiny_folder), new_trainer(tiny_folder)

    several = job.model_copy(update={"mini_batch_num": 3, "ppo_epochs": 2})
    metrics = step(together, several, batch)
    singles = [step(apart, job, part.batch) for part in mini_batches(batch, 3) * 2]

    assert len(singles) == 6
    assert torch.equal(weights(together), weights(apart))
    for name in ("loss", "grad_norm"):
        assert metrics[name] == pytest.approx(sum(one[name] for one in singles) / 6), name
    assert (metrics["skipped"], metrics[UPDATES_MADE]) == (0, 6)
    assert [one[UPDATES_MADE] for one in singles] == [1] * 6


def test_the_old_policy_of_all_updates_is_that_before_the_first(tiny_folder: Path) -> None:
    job = job_of(bypass_mode=False, lr=1e-2, mini_batch_num=2, ppo_epochs=2)
    batch = Batch(1, grouped_calls(), 0)
    together, apart = new_trainer(tiny_folder), new_trainer(tiny_folder)

    metrics = step(together, job, batch)
    apart.boot(job)
    parts = [
        replace(part.batch, calls=with_log_probs(apart, part.batch.calls))
        for part in mini_batches(batch, 2)
    ]
    for part in parts * 2:
        step(apart, job_of(lr=1e-2), part)

    torch.testing.assert_close(weights(together), weights(apart), atol=1e-7, rtol=0)
    assert metrics["clip_fraction"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_loss_coef": 0.1, "clip_ratio_c": 1.1, "rollout_rs": "token_k3"},
        {"loss": "gpg", "rollout_is": "token", "rollout_rs": "token_k3"},
    ],
    ids=["clipped", "corrected"],
)
def test_the_metrics_of_the_step_do_not_depend_on_the_number_of_mini_batches(
    tiny_folder: Path, settings: dict[str, Any]
) -> None:
    """The learning rate is so small that no update moves a weight. `loss` and `grad_norm` are those
    of the mini-batches."""
    calls = [replace(call, version=at % 2) for at, call in enumerate(grouped_calls())]
    still = {"lr": 1e-30, "weight_decay": 0.0, "rollout_rs_threshold": "0.5"}
    one, four = (
        step(
            new_trainer(tiny_folder),
            job_of(**settings | still | {"mini_batch_num": number}),
            Batch(1, calls, 1),
        )
        for number in (1, 4)
    )

    assert four.keys() == one.keys()
    assert one["rollout_rs_rejected"] > 0 and 0 < one["equal_version"] < 1
    assert (one[UPDATES_MADE], four[UPDATES_MADE]) == (1, 4)
    for name in one.keys() - CUT_DEPENDENT_METRICS - {"loss", "grad_norm", UPDATES_MADE}:
        assert four[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert four["rho"] > 1


def test_a_step_of_one_group_has_one_mini_batch(tiny_folder: Path) -> None:
    batch = Batch(1, grouped_calls(1))
    one, many = new_trainer(tiny_folder), new_trainer(tiny_folder)
    first, second = step(one, job_of(), batch), step(many, job_of(mini_batch_num=8), batch)

    assert torch.equal(weights(one), weights(many))
    volatile = {"seconds", "forest_speedup"}
    assert {name: first[name] for name in first.keys() - volatile} == {
        name: second[name] for name in second.keys() - volatile
    }


def test_a_step_too_far_from_its_engine_makes_no_update_in_any_mini_batch(
    trainer: PolicyTrainer,
) -> None:
    """Only the last mini-batch is far, and the mean over the step is above the limit."""
    calls = with_log_probs(trainer, grouped_calls(4))
    far = {call.group_id for call in mini_batches(Batch(1, calls), 4)[-1].batch.calls}
    assert len(far) == 1
    calls = [
        replace(call, logprobs=[value - 3 for value in call.logprobs])
        if call.group_id in far
        else call
        for call in calls
    ]
    before = weights(trainer)
    metrics = step(trainer, job_of(mini_batch_num=4, max_mismatch_k3=1.0), Batch(1, calls))

    assert metrics["too_far"] == metrics["no_update"] == 1 and metrics[UPDATES_MADE] == 0
    assert torch.equal(weights(trainer), before)


def test_a_loss_that_is_not_finite_in_one_mini_batch_prevents_all_updates(
    trainer: PolicyTrainer,
) -> None:
    calls = grouped_calls()
    last = mini_batches(Batch(1, calls), 3)[-1].batch.calls[0]
    poisoned = [replace(call, advantage=math.inf) if call is last else call for call in calls]
    before = weights(trainer)
    metrics = step(trainer, job_of(mini_batch_num=3), Batch(1, poisoned))

    assert metrics["skipped"] == metrics["no_update"] == 1 and metrics[UPDATES_MADE] == 0
    assert not math.isfinite(metrics["loss"])
    assert torch.equal(weights(trainer), before)


def test_a_step_that_stops_after_an_update_says_how_many_it_has_made(
    trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = iter([torch.tensor(1.0), torch.tensor(math.inf)])
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: next(norms))
    before = weights(trainer)
    metrics = step(trainer, job_of(mini_batch_num=3), Batch(1, grouped_calls()))

    assert metrics["skipped"] == metrics[UPDATES_MADE] == 1
    assert "no_update" not in metrics and not torch.equal(weights(trainer), before)


@pytest.mark.parametrize(("at", "error"), [(3, RuntimeError), (4, PartialStep)])
def test_a_failure_in_the_second_mini_batch_is_partial(
    trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch, at: int, error: type[Exception]
) -> None:
    """The first two calls of the loss measure the two mini-batches, and no weight has changed
    before the fourth call."""
    loss, num_calls = LOSSES["vanilla"], 0

    def failing(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at:
            raise RuntimeError("out of memory")
        return loss(*arguments)

    monkeypatch.setitem(LOSSES, "vanilla", failing)
    before = weights(trainer)
    with pytest.raises(error):
        step(
            trainer, job_of(mini_batch_num=2, micro_batch_tokens=100_000), Batch(1, grouped_calls())
        )
    assert torch.equal(weights(trainer), before) == (error is RuntimeError)
