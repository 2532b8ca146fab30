"""Training on demonstrations: the losses sft, dpo and kto."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import finish, load, random_calls, train
from swarm_server.backends.embedded.train.demonstration_steps import (
    demonstrations_for,
    gradient_of,
    gradient_of_step,
    wide_model,
)

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.micro_batches import cut_into_pieces
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.torch_losses.step_loss import SplitUnit, step_loss
from fakevllm_server.backends.training.step_calls import demonstration_calls
from fakevllm_server.types.backend import Batch
from fakevllm_server.types.demonstrations import Demonstration

LOSSES = ("sft", "dpo", "kto")
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"preference_beta": 0.3},
    "kto": {"preference_beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7},
}
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


def log_prob(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *response]])
    log_probs = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1], -1)
    return log_probs[range(len(response)), response].sum()


def formula(loss: str, policy: Any, reference: Any, rows: list[Demonstration]) -> torch.Tensor:
    """Return the loss as in the papers, row by row, without batching and without our losses."""

    def ratio(prompt: Any, response: Any) -> torch.Tensor:
        with torch.no_grad():
            expected = log_prob(reference, prompt, response)
        return log_prob(policy, prompt, response) - expected

    settings = SETTINGS[loss]
    if loss == "sft":
        total: Any = sum(log_prob(policy, [*row.prompt_ids], [*row.response_ids]) for row in rows)
        return -total / sum(len(row.response_ids) for row in rows)
    beta = settings["preference_beta"]
    ratios = [ratio([*row.prompt_ids], [*row.response_ids]) for row in rows]
    if loss == "dpo":
        margins = [good - bad for good, bad in zip(ratios[::2], ratios[1::2], strict=True)]
        losses = [-torch.log(1 / (1 + torch.exp(-beta * margin))) for margin in margins]
        return torch.stack(losses).mean()
    mismatched = [
        ratio([*row.prompt_ids], [*other.response_ids]).detach()
        for row, other in zip(rows, [rows[-1], *rows[:-1]], strict=True)
    ]
    z = torch.stack(mismatched).mean().clamp(min=0)
    losses = [
        settings["desirable_weight"] * (1 - torch.sigmoid(beta * (value - z)))
        if row.kind == "desirable"
        else settings["undesirable_weight"] * (1 - torch.sigmoid(beta * (z - value)))
        for row, value in zip(rows, ratios, strict=True)
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("micro_batch_tokens", [40, 4096])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_the_formula_however_the_step_is_cut(
    tiny_folder: Path, loss: str, micro_batch_tokens: int
) -> None:
    rows = demonstrations_for(loss)
    job = TrainJob(loss=loss, micro_batch_tokens=micro_batch_tokens, **SETTINGS[loss])  # pyright: ignore[reportArgumentType]
    actual, metrics = gradient_of_step(tiny_folder, job, rows)

    policy = wide_model(tiny_folder, seed=1)
    expected = formula(loss, policy, wide_model(tiny_folder), rows)
    expected.backward()
    assert expected.item() == pytest.approx(metrics["loss"], rel=1e-6)
    assert gradient_of(policy).abs().max() > 0.01
    torch.testing.assert_close(actual, gradient_of(policy), **CLOSE)


@pytest.mark.parametrize("loss", LOSSES)
def test_as_a_term_its_weighted_gradient_is_added_to_that_of_the_policy_loss(
    tiny_folder: Path, loss: str
) -> None:
    rows, calls = demonstrations_for(loss), random_calls(6)
    alone, _ = gradient_of_step(tiny_folder, TrainJob(loss=loss, **SETTINGS[loss]), rows)  # pyright: ignore[reportArgumentType]
    policy, plain = gradient_of_step(tiny_folder, TrainJob(), [], calls)
    both = TrainJob(demonstration_loss=loss, demonstration_loss_coef=0.25, **SETTINGS[loss])  # pyright: ignore[reportArgumentType]
    sum_of_both, metrics = gradient_of_step(tiny_folder, both, rows, calls)

    torch.testing.assert_close(sum_of_both, policy + 0.25 * alone, **CLOSE)
    expected = plain["loss"] + 0.25 * metrics["demonstration_loss"]
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["mismatch"] == pytest.approx(plain["mismatch"])


def test_a_demonstration_that_is_also_a_sampled_call_goes_through_the_model_once(
    tiny_folder: Path,
) -> None:
    calls = [replace(call, temperature=1.0) for call in random_calls(4)]
    rows = [Demonstration(one.group_id, one.prompt_ids, one.response_ids, "plain") for one in calls]
    _, plain = gradient_of_step(tiny_folder, TrainJob(), [], calls)
    _, metrics = gradient_of_step(tiny_folder, TrainJob(demonstration_loss="sft"), rows, calls)
    assert metrics["tokens_computed"] == plain["tokens_computed"]
    assert metrics["demonstrations"] == 4


def test_the_prompt_of_a_pair_goes_through_the_model_once(tiny_folder: Path) -> None:
    prompt = list(range(7, 107))
    rows = [
        Demonstration("g", prompt, [9, 8], "chosen", "g"),
        Demonstration("g", prompt, [5, 6, 7], "rejected", "g"),
    ]
    _, metrics = gradient_of_step(tiny_folder, TrainJob(loss="dpo"), rows)
    assert metrics["tokens_computed"] <= 100 + 2 + 3


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4, "lr": 1e-3}])
@pytest.mark.parametrize(("loss", "start"), [("dpo", math.log(2)), ("kto", 0.5)])
def test_dpo_begins_at_log_two_and_kto_at_one_half(
    tiny_folder: Path, loss: str, start: float, lora: dict[str, Any]
) -> None:
    """The policy equals the reference policy before the first step, and not after it."""
    trainer = PolicyTrainer(load(tiny_folder), partial(load, tiny_folder))
    job = TrainJob.model_validate({"loss": loss, "lr": 1e-3, **lora})
    trainer.boot(job)
    batch = Batch(1, [], demonstrations=demonstrations_for(loss))
    first, second = (finish(trainer.step(batch, LossSpec.of(job))) for _ in range(2))
    assert first["loss"] == pytest.approx(start, abs=1e-6)
    assert first["grad_norm"] > 0
    assert second["loss"] < start - 1e-5


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_without_demonstrations_reports_that_there_were_none(
    tiny_folder: Path, loss: str
) -> None:
    none = {"demonstrations": 0.0, "demonstration_tokens": 0.0}
    calls = random_calls(4)
    trainer = PolicyTrainer(load(tiny_folder), partial(load, tiny_folder))
    for settings, sampled, is_too_far in (
        ({"loss": loss}, [], False),
        ({"demonstration_loss": loss, "max_mismatch_k3": None}, calls, False),
        ({"demonstration_loss": loss, "max_mismatch_k3": 1e-9}, calls, True),
    ):
        job = TrainJob.model_validate(settings)
        trainer.boot(job)
        metrics = finish(trainer.step(Batch(1, sampled), LossSpec.of(job)))
        assert metrics.items() >= none.items()
        assert ("no_update" in metrics) == is_too_far
    assert "demonstrations" not in train(trainer, calls)


def test_if_all_rows_are_of_one_group_the_kl_estimate_of_kto_is_zero(tiny_folder: Path) -> None:
    rows = [replace(row, group_id="g") for row in demonstrations_for("kto")]
    _, metrics = gradient_of_step(tiny_folder, TrainJob(loss="kto"), rows)
    assert metrics["kto_kl"] == 0
    _, metrics = gradient_of_step(tiny_folder, TrainJob(loss="kto"), demonstrations_for("kto"))
    assert metrics["kto_kl"] > 0


def test_the_gradient_of_a_pair_that_does_not_fit_into_one_pass_is_exact(tiny_folder: Path) -> None:
    """The responses of several calls count as one response."""
    rows = [replace(row, pair="all") for row in demonstrations_for("dpo")]
    whole, plain = gradient_of_step(tiny_folder, TrainJob(loss="dpo"), rows)
    job = TrainJob(loss="dpo", micro_batch_tokens=12)
    split, metrics = gradient_of_step(tiny_folder, job, rows)
    torch.testing.assert_close(split, whole, **CLOSE)
    assert metrics["loss"] == pytest.approx(plain["loss"], rel=1e-6)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_loss_that_gets_only_a_part_of_the_coupled_demonstrations_raises_an_error(
    loss: str,
) -> None:
    rows = [replace(row, pair="all") for row in demonstrations_for(loss)]
    spec = LossSpec(name=loss)
    step = cut_into_pieces(
        demonstration_calls(rows),
        spec,
        12,
        torch.device("cpu"),
        shares_prefixes=True,
        demonstrations=rows,
    )
    assert step.whole is not None
    parts = [piece.tokens for piece in step.pieces]
    split = next(one for one in parts if one.demonstrations and not one.demonstrations.is_whole)
    with pytest.raises(SplitUnit, match=f"loss {loss} needs all demonstrations"):
        step_loss(torch.zeros(len(split.scale)), split, spec)


def test_an_answer_of_a_kind_that_the_loss_does_not_train_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match="the loss dpo does not train plain answers"):
        gradient_of_step(tiny_folder, TrainJob(loss="dpo"), demonstrations_for("sft"))
