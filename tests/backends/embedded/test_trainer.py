from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.embedded.driving import (
    SPEC,
    call_of,
    draft,
    load,
    plain_logprobs,
    random_calls,
    run_dry,
    sampling_state,
    train,
    weights,
)

from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.backends.base import BackendError, Batch, Call, LossSpec, StepMetrics
from fakevllm_server.backends.embedded.pieces import StepPieces, pieces_of
from fakevllm_server.backends.embedded.trainer import PolicyTrainer
from fakevllm_server.backends.sampling import Sampling


@pytest.fixture
def trainer(tiny_folder: Path) -> PolicyTrainer:
    return PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))


def sampled_calls(folder: Path, temperature: float, count: int = 6) -> list[Call]:
    state = sampling_state(load(folder))
    sampling = Sampling(temperature=temperature, ignore_eos=True)
    drafts = [draft(range(7, 20 + i), 10, sampling, seed=i) for i in range(count)]
    for one in drafts:
        state.scheduler.add(one)
    run_dry(state)
    return [
        call_of(one.ids[:-10], one.undelivered, sampling, (-1.0) ** i)
        for i, one in enumerate(drafts)
    ]


def pieces(calls: list[Call], max_tokens: int, spec: LossSpec = SPEC) -> StepPieces:
    return pieces_of(calls, spec, max_tokens, torch.device("cpu"), shares_prefixes=True)


def test_every_piece_fits_and_every_token_is_in_one_piece() -> None:
    calls = random_calls(40)
    step = pieces(calls, 60)
    sampled = [value for one in step.pieces for value in one.tokens.sampled_log_prob.tolist()]
    expected = torch.tensor([value for call in calls for value in call.logprobs])
    assert sorted(sampled) == sorted(expected.tolist())
    assert all(
        one.plan.forest.num_nodes <= 60 or len(one.plan.num_trained) == 1 for one in step.pieces
    )


def test_tokens_stand_in_the_order_their_log_probabilities_come_in() -> None:
    call = Call("g", [11, 12, 13], [21, 22], [-0.5, -0.25], 0, 1.0, 2.0, 0.5)
    shorter_prompt = Call("g", [31], [41, 42, 43], [-1.0, -2.0, -3.0], 0, 1.0, -1.0, 1.0)

    (piece,) = pieces([call, shorter_prompt], 1000).pieces

    chosen = piece.plan.edge_token[piece.plan.gather]
    assert chosen.tolist() == [21, 22, 41, 42, 43]
    assert piece.tokens.sampled_log_prob.tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0]
    assert piece.tokens.scale.tolist() == [0.125, 0.125, 0.25, 0.25, 0.25]


def test_the_gradient_is_that_of_the_plain_sum_over_calls(trainer: PolicyTrainer) -> None:
    """Against the formula written out call by call, without batching, padding or library."""
    calls = random_calls(12)
    total = sum(call.weight * len(call.response_ids) for call in calls)
    loss = torch.zeros(())
    for call in calls:
        network: Any = trainer.model
        ids = torch.tensor([[*call.prompt_ids, *call.response_ids]])
        log_probs = torch.log_softmax(network(input_ids=ids).logits[0, :-1] / call.temperature, -1)
        for at, (token, old) in enumerate(zip(call.response_ids, call.logprobs, strict=True)):
            ratio = (log_probs[len(call.prompt_ids) - 1 + at, token] - old).exp()
            a = call.advantage
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

    found = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])  # pyright: ignore[reportOptionalMemberAccess]
    assert num_pieces > 3
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_how_a_batch_is_cut_changes_nothing(tiny_folder: Path) -> None:
    calls = random_calls(20)
    results: list[StepMetrics] = []
    for micro_batch_tokens in (1, 70, 100_000):
        trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
        spec = LossSpec("vanilla", 0.2, 0.28, 3.0, kl_loss_coef=0.1)
        results.append(
            train(trainer, calls, spec, micro_batch_tokens=micro_batch_tokens, ppo_epochs=2)
        )

    for name in results[0].keys() - {"seconds", "rho", "tokens_computed"}:
        values = [metrics[name] for metrics in results]
        assert values == pytest.approx([values[0]] * 3, rel=1e-3, abs=1e-5), name
    assert results[0]["kl"] != 0 and results[0]["clip_fraction"] > 0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_engine_and_trainer_agree_on_what_was_sampled(
    trainer: PolicyTrainer, tiny_folder: Path, temperature: float
) -> None:
    metrics = train(trainer, sampled_calls(tiny_folder, temperature))

    assert metrics["mismatch"] < 1e-4
    assert abs(metrics["approx_kl"]) < 1e-4
    assert metrics["clip_fraction"] == 0


def test_mismatch_is_seen_when_the_engine_sampled_from_other_weights(
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
        assert (now - sum(call.logprobs)) * call.advantage > 0


def test_an_empty_batch_changes_nothing_and_reports_zeros(trainer: PolicyTrainer) -> None:
    before = weights(trainer)

    metrics = train(trainer, [], lr=0.1, weight_decay=0.1)

    assert torch.equal(weights(trainer), before)
    assert metrics["loss"] == metrics["grad_norm"] == metrics["tokens"] == 0
    assert metrics["lr"] == 0.1


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_skipped_and_the_next_step_trains(
    trainer: PolicyTrainer, poison: float
) -> None:
    good = random_calls(4)
    bad = Call("bad", [1, 2], [3, 4], [-1.0, -1.0], 0, 1.0, poison, 1.0)
    before = weights(trainer)

    skipped = train(trainer, [*good, bad], lr=1e-3)

    assert skipped["skipped"] == 1
    assert all(value == value for value in skipped.values()), "metrics travel as JSON"
    assert torch.equal(weights(trainer), before)
    assert train(trainer, good, lr=1e-3)["skipped"] == 0
    assert not torch.equal(weights(trainer), before)
    assert torch.isfinite(weights(trainer)).all()


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


def call_kl(trainer: PolicyTrainer, call: Call) -> float:
    plain = plain_logprobs(trainer.model, [*call.prompt_ids, *call.response_ids])
    start = len(call.prompt_ids) - 1
    pairs = zip(
        range(start, start + len(call.response_ids)), call.response_ids, call.logprobs, strict=True
    )
    return sum(abs(plain[at, token].item() - old) for at, token, old in pairs)


def test_the_pause_after_each_micro_batch_comes_once_per_epoch_and_piece(
    trainer: PolicyTrainer,
) -> None:
    calls = random_calls(6)
    trainer.boot(TrainJob(micro_batch_tokens=1, ppo_epochs=3))

    assert sum(1 for _ in trainer.step(Batch(1, calls), SPEC)) == 18


def siblings(folder: Path) -> list[Call]:
    """Two groups of sampled siblings, one of them with a next turn each."""
    state = sampling_state(load(folder))
    sampling = Sampling(temperature=1.0, ignore_eos=True)
    drafts = [
        draft(range(7 + group, 40), 6, sampling, seed=i) for group in (0, 9) for i in range(4)
    ]
    for one in drafts:
        state.scheduler.add(one)
    run_dry(state)
    calls = [
        call_of(one.ids[:-6], one.undelivered, sampling, (-1.0) ** i)
        for i, one in enumerate(drafts)
    ]
    turns = [
        Call(
            "g",
            [*call.prompt_ids, *call.response_ids, 5, 6],
            [8, 9],
            [-3.0, -4.0],
            0,
            1.0,
            1.0,
            0.5,
        )
        for call in calls[:4]
    ]
    return [*calls, *turns]


@pytest.mark.parametrize("spec", [SPEC, LossSpec("gspo", 3e-4, 4e-4, kl_loss_coef=0.1)])
def test_sharing_prefixes_trains_the_same_weights(tiny_folder: Path, spec: LossSpec) -> None:
    moved: list[torch.Tensor] = []
    for forest in (True, False):
        trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
        before = weights(trainer)
        for _ in range(10):
            rho = train(trainer, siblings(tiny_folder), spec, forest=forest, lr=1e-3)["rho"]
            assert rho > 2 if forest else rho == 1
        moved.append(weights(trainer) - before)
    assert moved[0].norm() > 0
    assert (moved[0] - moved[1]).norm() < 1e-2 * moved[0].norm()


def test_a_sequence_in_several_pieces_trains_as_in_one(tiny_folder: Path) -> None:
    """Calls of one episode are one ratio to gspo, wherever they go through the model."""
    calls = [replace(call, unit=f"episode {i % 4}") for i, call in enumerate(siblings(tiny_folder))]
    spec = LossSpec("gspo", 3e-4, 4e-4, entropy_coeff=0.01, kl_loss_coef=0.1, bypass_mode=False)
    assert pieces(calls, 60, spec).whole is not None and pieces(calls, 10_000, spec).whole is None
    results: list[StepMetrics] = []
    for micro_batch_tokens in (60, 10_000):
        trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
        results.append(
            train(trainer, calls, spec, micro_batch_tokens=micro_batch_tokens, ppo_epochs=2)
        )
    for name in results[0].keys() - {"seconds", "rho", "tokens_computed"}:
        values = [metrics[name] for metrics in results]
        assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-5), name
    assert results[0]["grad_norm"] > 0 and results[0]["kl"] != 0


def test_a_model_that_cannot_share_prefixes_trains_without_and_says_so(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
    trainer.model.config.rope_parameters["rope_type"] = "dynamic"
    for _ in range(2):
        metrics = train(trainer, siblings(tiny_folder))
        assert metrics["rho"] == 1.0 and metrics["grad_norm"] > 0
    (told,) = caplog.messages
    assert "dynamic" in told


def test_a_model_whose_log_probabilities_come_out_wrong_is_not_trained(
    trainer: PolicyTrainer, tiny_folder: Path
) -> None:
    network: Any = trainer.model
    plain = network.forward

    def doubled(*given: Any, **named: Any) -> Any:
        output = plain(*given, **named)
        output.logits = output.logits * 2
        return output

    network.forward = doubled
    before = weights(trainer)
    with pytest.raises(BackendError, match="cannot be trained here"):
        train(trainer, siblings(tiny_folder))
    assert torch.equal(weights(trainer), before)


def test_an_update_before_a_skipped_one_is_told(trainer: PolicyTrainer, tiny_folder: Path) -> None:
    """At this rate the second epoch's ratios overflow."""
    calls = siblings(tiny_folder)
    before = weights(trainer)
    metrics = train(trainer, calls, LossSpec("cispo", 10.0, 0.2), lr=1e30, ppo_epochs=2)
    assert metrics["skipped"] == 1 and metrics["tokens"] > 0
    assert metrics["grad_norm"] > 0
    assert not torch.equal(weights(trainer), before)
