"""A boot chooses the attention before calls are collected for a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import (
    EngineMaker,
    finish,
    load,
    random_calls,
    train,
    weights,
)
from torch import Tensor

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.embedded.weights import adapters_of
from fakevllm_server.backends.torch_forest.attention.registry import ATTENTIONS, sharing_attentions
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.types.backend import BackendRefused, Call

CPU_WAYS = sharing_attentions(torch.device("cpu"))
RecordedPasses = list[tuple[str, int]]


def family() -> list[Call]:
    return [call for call in random_calls(5) for _ in range(3)]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> RecordedPasses:
    """Record the attention of each pass, and the number of adapters in the model."""
    passes: RecordedPasses = []

    def recording(name: str, way: Callable[[Any, Plan], Tensor]) -> Callable[[Any, Plan], Tensor]:
        def recorded(model: Any, plan: Plan) -> Tensor:
            passes.append((name, len(adapters_of(model))))
            return way(model, plan)

        return recorded

    for name, way in list(ATTENTIONS.items()):
        monkeypatch.setitem(ATTENTIONS, name, recording(name, way))
    return passes


def test_a_boot_checks_rows_and_the_preferred_attention(
    trainer: PolicyTrainer, passes: RecordedPasses
) -> None:
    trainer.boot(TrainJob())
    assert passes == [("rows", 0), (CPU_WAYS[0], 0)]


def test_a_boot_without_sharing_checks_only_rows_until_a_job_shares(
    trainer: PolicyTrainer, passes: RecordedPasses
) -> None:
    trainer.boot(TrainJob(forest=False))
    assert passes == [("rows", 0)]
    trainer.boot(TrainJob())
    assert passes == [("rows", 0), (CPU_WAYS[0], 0)]


def test_a_boot_checks_again_only_if_the_model_computes_differently(
    trainer: PolicyTrainer, passes: RecordedPasses
) -> None:
    trainer.boot(TrainJob())
    checked = len(passes)
    trainer.boot(TrainJob(lr=1.0))
    assert len(passes) == checked
    trainer.boot(TrainJob(gradient_checkpointing=True))
    assert len(passes) == 2 * checked


def test_the_checked_model_has_the_adapters_of_the_job(
    trainer: PolicyTrainer, passes: RecordedPasses
) -> None:
    trainer.boot(TrainJob(lora_rank=2, target_modules="q_proj"))
    assert passes == [("rows", 2), (CPU_WAYS[0], 2)]


def test_new_adapters_are_checked_although_the_model_without_them_passed(
    trainer: PolicyTrainer, passes: RecordedPasses
) -> None:
    finish(trainer.log_probs([], "trained"))
    assert passes == [("rows", 0), (CPU_WAYS[0], 0)]
    passes.clear()
    trainer.boot(TrainJob(lora_rank=2, target_modules="q_proj"))
    assert passes == [("rows", 2), (CPU_WAYS[0], 2)]


def doubles_its_logits(model: Any) -> None:
    """Double the model's logits, like an LM head that the forward code does not know."""
    plain = model.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = doubled


@pytest.mark.parametrize("forest", [True, False])
def test_a_model_with_wrong_log_probabilities_is_refused_at_boot(
    trainer: PolicyTrainer, forest: bool
) -> None:
    doubles_its_logits(trainer.model)
    before = weights(trainer)
    for _ in range(2):
        with pytest.raises(
            BackendRefused, match=r"cannot be trained here: .*log-prob.*choose another --model"
        ):
            trainer.boot(TrainJob(forest=forest))
    assert torch.equal(weights(trainer), before)


async def test_an_engine_refuses_a_model_with_wrong_rows_and_keeps_sampling(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: Any, plan: Plan) -> Tensor:
        return ATTENTIONS["dense"](model, plan) * 2

    engine = make_engine()
    monkeypatch.setitem(ATTENTIONS, "rows", wrong)
    with pytest.raises(BackendRefused, match="cannot be trained here: attention rows"):
        await engine.boot(TrainJob())
    await engine.publish(1)


def failing(model: Any, plan: Plan) -> Tensor:
    raise NotImplementedError("no such kernel")


def test_the_next_attention_is_used_and_logged_if_the_fastest_fails(
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    passes: RecordedPasses,
) -> None:
    assert CPU_WAYS == ["chains", "segments"]
    monkeypatch.setitem(ATTENTIONS, "chains", failing)
    trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
    trainer.boot(TrainJob())
    (message,) = caplog.messages
    assert message.startswith("calls share prefixes by attention segments: attention chains fails")
    passes.clear()
    for _ in range(2):
        assert train(trainer, family())["rho"] > 2
    assert ("segments", 0) in passes
    assert len(caplog.messages) == 1


def test_calls_are_computed_one_by_one_if_no_attention_shares_and_each_reason_is_logged(
    trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for way in CPU_WAYS:
        monkeypatch.setitem(ATTENTIONS, way, failing)
    for _ in range(2):
        metrics = train(trainer, family())
        assert metrics["rho"] == 1 and metrics["grad_norm"] > 0
    (message,) = caplog.messages
    assert message.startswith("calls share no prefixes in training: attention chains fails")
    assert "attention segments fails" in message


def test_a_gpu_falls_from_flex_to_segments() -> None:
    assert sharing_attentions(torch.device("cuda")) == ["flex", "segments"]
