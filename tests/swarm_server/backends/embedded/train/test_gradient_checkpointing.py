"""Gradient checkpointing: the same gradient from less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import finish, load, plain_logprobs, random_calls
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.gradient_checkpointing import (
    set_gradient_checkpointing,
)
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.torch_forest.attention_check import check_sharing_attention
from fakevllm_server.types.backend import BackendError, Batch, Call, LossSpec

SPEC = LossSpec("gspo", 3e-4, 4e-4, kl_loss_coef=0.1, entropy_coeff=0.01, bypass_mode=False)
LORA = {"lora_rank": 4}


def deep(num_layers: int = 8) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Off outside training mode, which nothing here may switch on.
        attention_dropout=0.5,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def calls() -> list[Call]:
    return [call for call in random_calls(4) for _ in range(2)]


def gradient(trainer: PolicyTrainer, **job: Any) -> Tensor:
    """Return the gradient of one step, flat, of the weights that train."""
    gradients: list[Tensor] = []

    def look(*_: object) -> None:
        trained = [one for one in trainer.model.parameters() if one.requires_grad]
        gradients.append(torch.cat([one.grad.flatten() for one in trained if one.grad is not None]))

    trainer.boot(TrainJob(max_mismatch_k3=None, grad_clip=1e9, **job))
    trainer.optimizer.register_step_pre_hook(look)
    finish(trainer.step(Batch(1, calls()), SPEC))
    (only,) = gradients
    return only


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [{}, LORA])
@pytest.mark.parametrize("forest", [True, False])
def test_gradient_checkpointing_does_not_change_the_gradient(
    forest: bool, lora: dict[str, Any], dtype: torch.dtype
) -> None:
    job: dict[str, Any] = {"forest": forest, "micro_batch_tokens": 60, **lora}
    plain, recomputed = (
        gradient(
            PolicyTrainer(deep(2), lambda: deep(2), dtype), gradient_checkpointing=wanted, **job
        )
        for wanted in (False, True)
    )
    assert plain.norm() > 0
    assert (plain - recomputed).norm() < 1e-5 * plain.norm()


def held(model: Any, loss_of: Callable[[], Tensor]) -> int:
    """Return the bytes of tensors saved for the backward pass, without the weights."""
    kept: dict[int, int] = {}
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of().backward()
    return sum(kept.values())


def test_checkpointed_layers_keep_only_their_inputs() -> None:
    model = deep()
    ids = torch.arange(100)[None]

    def loss() -> Tensor:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state.sum()

    plain = held(model, loss)
    assert set_gradient_checkpointing(model, True)
    assert held(model, loss) < plain / 5
    assert set_gradient_checkpointing(model, False)
    assert held(model, loss) == plain


@pytest.mark.parametrize("attention", ["chains", "segments", "dense", "rows"])
def test_a_model_with_gradient_checkpointing_passes_the_self_check(attention: str) -> None:
    model = deep()
    set_gradient_checkpointing(model, True)
    check = check_sharing_attention(model, attention)
    assert check.fault is None and check.gradient > 0


def test_no_layer_is_in_training_mode() -> None:
    model = deep()
    before = plain_logprobs(model, range(30))
    set_gradient_checkpointing(model, True)
    assert not any(module.training for module in model.modules())
    assert torch.equal(plain_logprobs(model, range(30)), before)


def test_every_boot_sets_gradient_checkpointing(tiny_folder: Path) -> None:
    trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
    own = type(trainer.model.get_submodule("model.layers.0")).forward
    for wanted in (True, True, False, True):
        trainer.boot(TrainJob(gradient_checkpointing=wanted, max_mismatch_k3=None))
        layer = trainer.model.get_submodule("model.layers.0")
        assert ("forward" in vars(layer)) is wanted
        finish(trainer.step(Batch(1, calls()), LossSpec()))
    trainer.boot(TrainJob())
    bound: Any = layer.forward
    assert bound.__func__ is own


def test_a_model_without_layers_to_recompute_is_refused() -> None:
    model: Any = nn.Linear(2, 2)
    assert not set_gradient_checkpointing(model, False)
    with pytest.raises(BackendError, match="take gradient_checkpointing out"):
        set_gradient_checkpointing(model, True)
