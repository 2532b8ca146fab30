"""The checks and metrics of a step's tokens, and steps that are not trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import (
    SPEC,
    finish,
    load,
    pieces,
    random_calls,
    train,
    weights,
)
from swarm_server.backends.embedded.train.test_trainer_forest import siblings

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train import prefix_sharing_speedup
from fakevllm_server.backends.embedded.train import trainer as trainer_module
from fakevllm_server.backends.embedded.train.micro_batches import StepPieces
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.types.backend import BackendError, Batch, Call, LossSpec, StepMetrics


def sampled(folder: Path) -> list[Call]:
    """Return calls that the model itself sampled, at version 0."""
    return siblings(folder)[:8]


COUPLED = LossSpec("gpg", rollout_is="token", rollout_is_batch_normalize=True)
"""A loss in which each token depends on all others."""


def off(call: Call, by: float) -> Call:
    return replace(call, logprobs=[value - by for value in call.logprobs])


def step(trainer: PolicyTrainer, calls: list[Call], version: int, **job: Any) -> StepMetrics:
    trainer.boot(TrainJob(**job))
    return finish(trainer.step(Batch(1, calls, version), SPEC))


def test_calls_sampled_by_the_model_itself_are_exact_and_on_policy(
    trainer: PolicyTrainer, tiny_folder: Path
) -> None:
    metrics = step(trainer, sampled(tiny_folder), version=0)

    assert metrics["token_fidelity"] == 1 and metrics["equal_version"] == 1
    assert metrics["mismatch"] < 1e-4 and metrics["mismatch_k3"] < 1e-6
    assert metrics["ess"] == pytest.approx(1, abs=1e-4) and metrics["mismatch_large"] == 0
    assert "too_far" not in metrics and metrics["grad_norm"] > 0


def test_samples_of_older_weights_do_not_count_in_the_mismatch(
    trainer: PolicyTrainer, tiny_folder: Path
) -> None:
    """Calls of older weights differ more, and do not enter the mismatch."""
    fresh = [replace(call, version=3) for call in sampled(tiny_folder)]
    old = [replace(off(call, 0.6), version=2) for call in fresh[:4]]
    metrics = step(trainer, [*fresh[4:], *old], version=3)

    assert metrics["equal_version"] == pytest.approx(0.5)
    assert metrics["mismatch"] < 1e-4 and metrics["mismatch_large"] == 0
    k3 = math.exp(0.6) - 0.6 - 1
    assert metrics["approx_kl"] == pytest.approx(k3 / 2, rel=1e-3)


def test_the_mismatch_is_of_all_tokens_if_all_are_older(
    trainer: PolicyTrainer, tiny_folder: Path
) -> None:
    metrics = step(trainer, [off(call, 0.6) for call in sampled(tiny_folder)], version=1)

    assert metrics["equal_version"] == 0
    assert metrics["mismatch"] == pytest.approx(0.6, rel=1e-3) and metrics["mismatch_large"] == 1
    assert metrics["mismatch_k3"] == pytest.approx(metrics["approx_kl"], rel=1e-4)


@pytest.mark.parametrize("spec", [SPEC, LossSpec("gspo", 3e-4, 4e-4, entropy_coeff=0.01)])
@pytest.mark.parametrize("max_tokens", [30, 60])
def test_the_mismatch_of_pieces_equals_that_of_the_whole(
    tiny_folder: Path, spec: LossSpec, max_tokens: int
) -> None:
    calls = [
        replace(off(call, 0.1 * at), version=at % 2, unit=f"episode {at % 3}")
        for at, call in enumerate(sampled(tiny_folder))
    ]
    metrics: list[StepMetrics] = []
    for budget in (max_tokens, 10_000):
        trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
        trainer.boot(TrainJob(micro_batch_tokens=budget))
        metrics.append(finish(trainer.step(Batch(1, calls, 1), spec)))
    for name in ("mismatch", "mismatch_k3", "mismatch_large", "ess", "equal_version"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-4), name
    assert metrics[0]["ess"] < 0.99


@pytest.mark.parametrize("max_mismatch_k3", [0.1, 0.4, None])
def test_a_step_above_the_mismatch_limit_makes_no_update(
    trainer: PolicyTrainer, tiny_folder: Path, max_mismatch_k3: float | None
) -> None:
    """If all log-probabilities are off by 0.6, k3 is 0.22."""
    before = weights(trainer)
    calls = [off(call, 0.6) for call in sampled(tiny_folder)]
    metrics = step(trainer, calls, version=0, max_mismatch_k3=max_mismatch_k3, lr=1e-3)

    is_too_far = max_mismatch_k3 == 0.1
    assert metrics["mismatch_k3"] == pytest.approx(math.exp(0.6) - 0.6 - 1, rel=1e-3)
    assert (metrics["skipped"], metrics.get("too_far", 0.0)) == (float(is_too_far),) * 2
    assert torch.equal(weights(trainer), before) is is_too_far
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_the_default_mismatch_limit_passes_sampled_calls_and_stops_made_up_calls(
    trainer: PolicyTrainer, tiny_folder: Path
) -> None:
    assert "too_far" not in step(trainer, sampled(tiny_folder), version=0)
    assert step(trainer, random_calls(8), version=0)["too_far"] == 1


def swapped_gather(step: StepPieces) -> StepPieces:
    piece = step.pieces[0]
    gather = piece.plan.gather.flip(0)
    return replace(
        step, pieces=[replace(piece, plan=replace(piece.plan, gather=gather)), *step.pieces[1:]]
    )


def shifted_log_probs(step: StepPieces) -> StepPieces:
    piece = step.pieces[-1]
    tokens = replace(piece.tokens, sampled_log_prob=piece.tokens.sampled_log_prob.roll(1))
    return replace(step, pieces=[*step.pieces[:-1], replace(piece, tokens=tokens)])


def another_order(step: StepPieces) -> StepPieces:
    assert step.whole is not None, "a loss that couples tokens of different pieces"
    turned = replace(step.whole, sampled_log_prob=step.whole.sampled_log_prob.flip(0))
    return replace(step, whole=turned)


def a_piece_twice(step: StepPieces) -> StepPieces:
    return replace(step, pieces=[*step.pieces, step.pieces[0]])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (swapped_gather, r"piece 0: call 0 \(group \w+\), response token 0"),
        (shifted_log_probs, r"piece \d: call \d \(group \w+\), response token 0"),
        (a_piece_twice, "do not hold each call once"),
        (another_order, "not those of its pieces"),
    ],
)
def test_tokens_that_differ_from_the_record_are_not_trained(
    trainer: PolicyTrainer,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[StepPieces], StepPieces],
    message: str,
) -> None:
    calls = sampled(tiny_folder)
    plain = trainer_module.cut_into_pieces

    def spoilt(*args: Any, **kwargs: Any) -> StepPieces:
        return spoil(plain(*args, **kwargs))

    before = weights(trainer)
    monkeypatch.setattr(trainer_module, "cut_into_pieces", spoilt)
    with pytest.raises(BackendError, match=message):
        train(trainer, calls, COUPLED, lr=1e-3, micro_batch_tokens=40)

    assert torch.equal(weights(trainer), before)
    monkeypatch.undo()
    assert train(trainer, calls, lr=1e-3, micro_batch_tokens=40)["token_fidelity"] == 1


def test_tokens_saved_by_sharing_are_counted(trainer: PolicyTrainer, tiny_folder: Path) -> None:
    calls = sampled(tiny_folder)
    metrics = train(trainer, calls, micro_batch_tokens=10_000)
    naive = sum(len(call.prompt_ids) + len(call.response_ids) for call in calls)

    assert metrics["tokens_computed"] + metrics["tokens_saved"] == naive
    assert metrics["rho"] == pytest.approx(naive / metrics["tokens_computed"])


def counted(made: Generator[None, None, StepMetrics]) -> tuple[int, float]:
    """Run a step, and return how often it paused and the speedup that it reported."""
    num_pauses = 0
    while True:
        try:
            next(made)
        except StopIteration as stop:
            return num_pauses, stop.value.get("forest_speedup", 0.0)
        num_pauses += 1


def test_the_speedup_is_measured_at_the_first_sharing_step_and_rarely_afterwards(
    trainer: PolicyTrainer, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_sharing_speedup, "EVERY", 3)
    trainer.boot(TrainJob(max_mismatch_k3=None))
    calls = sampled(tiny_folder)
    alone = [calls[0]]
    results = [
        counted(trainer.step(Batch(1, batch_calls), SPEC)) for batch_calls in (alone, *[calls] * 4)
    ]
    measuring = [1, 4]
    assert results[0] == (1, 0.0), "one call shares nothing"
    assert [at for at, (num_pauses, _) in enumerate(results) if num_pauses > 1] == measuring
    speedups = [speedup for _, speedup in results[1:]]
    assert speedups[0] > 0 and speedups[:3] == [speedups[0]] * 3


def never(*args: Any) -> Generator[None, None, None]:
    yield from ()


def test_measuring_the_speedup_changes_no_weight(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[torch.Tensor] = []
    for is_measured in (True, False):
        if not is_measured:
            monkeypatch.setattr(prefix_sharing_speedup.SharingSpeedup, "measure", never)
        trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
        train(trainer, sampled(tiny_folder), lr=1e-3)
        metrics = train(trainer, sampled(tiny_folder), lr=1e-3)
        assert ("forest_speedup" in metrics) is is_measured
        trained.append(weights(trainer))
    assert torch.equal(*trained)


def test_a_failed_speedup_measurement_does_not_fail_the_step(
    trainer: PolicyTrainer,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(prefix_sharing_speedup, "cut_into_pieces", fails)
    before = weights(trainer)
    metrics = train(trainer, sampled(tiny_folder), lr=1e-3)

    assert "forest_speedup" not in metrics and metrics["skipped"] == 0
    assert not torch.equal(weights(trainer), before)
    assert "could not be measured" in caplog.text


def test_pieces_mark_the_tokens_of_the_current_version() -> None:
    calls = [replace(call, version=at % 2) for at, call in enumerate(random_calls(6))]
    (piece,) = pieces(calls, 10_000, version=1).pieces
    expected = [calls[at].version == 1 for at in piece.calls for _ in calls[at].response_ids]
    assert piece.is_equal_version.tolist() == expected
