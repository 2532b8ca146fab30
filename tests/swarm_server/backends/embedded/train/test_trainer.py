from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import (
    CUT_DEPENDENT_METRICS,
    SPEC,
    call_of,
    decode_request,
    load,
    pieces,
    plain_logprobs,
    random_calls,
    run_dry,
    sampling_state,
    train,
    weights,
    with_token_advantages,
)

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.micro_batches import cut_into_pieces
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.training.step_updates import UPDATES_MADE
from fakevllm_server.types.backend import Batch, Call, LossSpec, StepMetrics
from fakevllm_server.types.sampling import Sampling


def sampled_calls(folder: Path, temperature: float, count: int = 6) -> list[Call]:
    state = sampling_state(load(folder))
    sampling = Sampling(temperature=temperature, ignore_eos=True)
    requests = [decode_request(range(7, 20 + i), 10, sampling, seed=i) for i in range(count)]
    for one in requests:
        state.scheduler.add(one)
    run_dry(state)
    return [
        call_of(one.ids[:-10], one.undelivered, sampling, (-1.0) ** i)
        for i, one in enumerate(requests)
    ]


def test_the_gradient_is_that_of_the_plain_sum_over_calls(trainer: PolicyTrainer) -> None:
    """The expected gradient is the formula, written out call by call without batching, padding or
    our losses."""
    calls = with_token_advantages(random_calls(12))
    total = sum(call.weight * len(call.response_ids) for call in calls)
    loss = torch.zeros(())
    for call in calls:
        network: Any = trainer.model
        ids = torch.tensor([[*call.prompt_ids, *call.response_ids]])
        log_probs = torch.log_softmax(network(input_ids=ids).logits[0, :-1] / call.temperature, -1)
        for at, (token, old) in enumerate(zip(call.response_ids, call.logprobs, strict=True)):
            ratio = (log_probs[len(call.prompt_ids) - 1 + at, token] - old).exp()
            a = call.advantages[at]
            worse = torch.maximum(-a * ratio, -a * ratio.clamp(1 - 0.2, 1 + 0.28))
            loss = loss + call.weight * (
                torch.minimum(worse, torch.tensor(-a * 3.0)) if a < 0 else worse
            )
    (loss / total).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])  # pyright: ignore[reportOptionalMemberAccess]
    trainer.optimizer.zero_grad()

    trainer.boot(TrainJob(micro_batch_tokens=64, grad_clip=1e9))
    step = trainer.step(Batch(1, calls), SPEC)
    num_pieces = len(pieces(calls, 64).pieces)
    for _ in range(num_pieces):
        next(step)

    actual = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])  # pyright: ignore[reportOptionalMemberAccess]
    assert num_pieces > 3
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


def test_the_result_does_not_depend_on_how_a_batch_is_cut(tiny_folder: Path) -> None:
    calls = random_calls(20)
    results: list[StepMetrics] = []
    for micro_batch_tokens in (1, 70, 100_000):
        trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
        spec = LossSpec("vanilla", 0.2, 0.28, 3.0, kl_loss_coef=0.1)
        results.append(
            train(trainer, calls, spec, micro_batch_tokens=micro_batch_tokens, ppo_epochs=2)
        )

    for name in results[0].keys() - CUT_DEPENDENT_METRICS:
        values = [metrics[name] for metrics in results]
        assert values == pytest.approx([values[0]] * 3, rel=1e-3, abs=1e-5), name
    assert results[0]["kl"] != 0 and results[0]["clip_fraction"] > 0


def test_the_docs_name_the_metrics_that_later_epochs_change(tiny_folder: Path) -> None:
    clipped = {"loss": "vanilla", "kl_loss_coef": 0.1, "clip_ratio_c": 1.1}
    corrected = {"loss": "gpg", "rollout_is": "token", "rollout_rs": "token_k3"}
    bounds = {"rollout_rs_threshold": "0.5"}
    changed: set[str] = set()
    for settings in (clipped, corrected | bounds):
        one, three = (
            train(
                PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder)),
                random_calls(20),
                LossSpec.of(TrainJob.model_validate(settings)),
                ppo_epochs=epochs,
                lr=1e-2,
            )
            for epochs in (1, 3)
        )
        assert (one.pop(UPDATES_MADE), three.pop(UPDATES_MADE)) == (1, 3)
        changed |= {name for name in one.keys() - CUT_DEPENDENT_METRICS if one[name] != three[name]}
    page = (Path(__file__).parents[5] / "docs/algorithms.md").read_text()
    sentence = re.search(r"^(.*) are means over the epochs of a step", page, re.M)
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) == changed


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_engine_and_trainer_agree_on_what_was_sampled(
    trainer: PolicyTrainer, tiny_folder: Path, temperature: float
) -> None:
    metrics = train(trainer, sampled_calls(tiny_folder, temperature))

    assert metrics["mismatch"] < 1e-4
    assert abs(metrics["approx_kl"]) < 1e-4
    assert metrics["clip_fraction"] == 0


def test_a_mismatch_is_reported_if_the_engine_sampled_from_other_weights(
    trainer: PolicyTrainer,
) -> None:
    metrics = train(trainer, random_calls(8))

    assert metrics["mismatch"] > 0.1 and metrics["approx_kl"] > 0.01


def test_good_replies_become_likelier_and_bad_ones_less(
    trainer: PolicyTrainer, tiny_folder: Path
) -> None:
    calls = sampled_calls(tiny_folder, 1.0)

    train(trainer, calls, lr=1e-3)

    for call in calls:
        plain = plain_logprobs(trainer.model, [*call.prompt_ids, *call.response_ids])
        start = len(call.prompt_ids) - 1
        now = sum(plain[start + at, token].item() for at, token in enumerate(call.response_ids))
        assert (now - sum(call.logprobs)) * call.advantages[0] > 0


def test_an_empty_batch_changes_nothing_and_reports_only_what_it_measured(
    trainer: PolicyTrainer,
) -> None:
    before = weights(trainer)

    metrics = train(trainer, [], lr=0.1, weight_decay=0.1)

    assert torch.equal(weights(trainer), before)
    assert metrics["tokens"] == metrics["skipped"] == 0 and metrics["lr"] == 0.1
    assert not {"loss", "grad_norm", "mismatch_k3", "ess", "forest_speedup"} & metrics.keys()


def test_a_step_without_a_reference_reports_no_kl(trainer: PolicyTrainer) -> None:
    metrics = train(trainer, random_calls(4))
    assert "kl" not in metrics and metrics["loss"] != 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_skipped_and_the_next_step_trains(
    trainer: PolicyTrainer, poison: float
) -> None:
    good = random_calls(4)
    bad = Call("bad", [1, 2], [3, 4], [-1.0, -1.0], 0, 1.0, poison, 1.0)
    before = weights(trainer)

    skipped = train(trainer, [*good, bad], lr=1e-3)

    assert skipped["skipped"] == skipped["no_update"] == 1
    assert not math.isfinite(skipped["loss"]) and not math.isfinite(skipped["grad_norm"])
    assert math.isfinite(skipped["mismatch_k3"]), "which the advantage is no part of"
    assert torch.equal(weights(trainer), before)
    assert train(trainer, good, lr=1e-3)["skipped"] == 0
    assert not torch.equal(weights(trainer), before)
    assert torch.isfinite(weights(trainer)).all()


@pytest.mark.parametrize("at", [0, 3])
def test_a_nan_in_one_piece_is_a_nan_in_the_step(trainer: PolicyTrainer, at: int) -> None:
    calls = random_calls(4)
    calls[at] = replace(calls[at], logprobs=[float("nan")] * len(calls[at].logprobs))
    metrics = train(trainer, calls, micro_batch_tokens=1)
    for name in ("prob_diff_max", "mismatch_k3", "approx_kl", "loss"):
        assert math.isnan(metrics[name]), name


def test_an_abandoned_step_leaves_no_gradient_behind(trainer: PolicyTrainer) -> None:
    trainer.boot(TrainJob(micro_batch_tokens=1))
    step = trainer.step(Batch(1, random_calls(4)), SPEC)
    next(step)

    step.close()

    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_the_kl_term_pulls_back_to_the_starting_weights(tiny_folder: Path) -> None:
    distances: list[float] = []
    for kl_loss_coef in (0.0, 10.0):
        trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
        spec = LossSpec("vanilla", 0.2, 0.28, 3.0, kl_loss_coef)
        calls = sampled_calls(tiny_folder, 1.0)
        for _ in range(8):
            train(trainer, calls, spec, lr=1e-3)
        distances.append(sum(call_kl(trainer, call) for call in calls))

    assert distances[1] < distances[0] / 2


def test_calls_with_advantage_zero_are_moved_only_by_the_kl_term(
    tiny_folder: Path,
) -> None:
    """With `filter_groups = "keep"`, groups without signal are trained with advantage 0."""
    calls = sampled_calls(tiny_folder, 1.0)
    tied = [replace(call, advantage=0.0) for call in calls]
    distances: list[float] = []
    for kl_loss_coef in (0.0, 10.0):
        trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
        spec = LossSpec("vanilla", 0.2, 0.28, 3.0, kl_loss_coef)
        train(trainer, tied, spec, lr=1e-3)
        if kl_loss_coef == 0:
            assert sum(call_kl(trainer, call) for call in calls) < 1e-3, "it moved"
        for _ in range(4):
            train(trainer, calls, replace(spec, kl_loss_coef=0.0), lr=1e-3)
        for _ in range(4):
            train(trainer, tied, spec, lr=1e-3)
        distances.append(sum(call_kl(trainer, call) for call in calls))
    assert distances[1] < distances[0] * 0.75


def call_kl(trainer: PolicyTrainer, call: Call) -> float:
    plain = plain_logprobs(trainer.model, [*call.prompt_ids, *call.response_ids])
    start = len(call.prompt_ids) - 1
    pairs = zip(
        range(start, start + len(call.response_ids)), call.response_ids, call.logprobs, strict=True
    )
    return sum(abs(plain[at, token].item() - old) for at, token, old in pairs)


def test_a_step_pauses_once_per_epoch_and_piece(
    trainer: PolicyTrainer,
) -> None:
    calls = random_calls(6)
    budget = max(len(call.prompt_ids) + len(call.response_ids) for call in calls)
    trainer.boot(TrainJob(micro_batch_tokens=budget, ppo_epochs=3, max_mismatch_k3=None))
    cut = cut_into_pieces(calls, SPEC, budget, trainer.model.device, shares_prefixes=True)
    assert len(cut.pieces) > 1
    assert sum(1 for _ in trainer.step(Batch(1, calls), SPEC)) == 3 * len(cut.pieces)


def test_siblings_share_a_prompt_that_exceeds_the_budget(
    trainer: PolicyTrainer,
) -> None:
    prompt = list(range(7, 107))
    calls = [replace(call, prompt_ids=prompt) for call in random_calls(4)]
    most = sum(len(call.response_ids) for call in calls)
    cut = cut_into_pieces(calls, SPEC, most, trainer.model.device, shares_prefixes=True)
    assert most < len(prompt) and len(cut.pieces) == 1
    assert cut.metrics["tokens_computed"] <= len(prompt) + most
