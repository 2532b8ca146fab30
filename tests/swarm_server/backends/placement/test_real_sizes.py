"""The figures of the plan are those of real models, of the real trainer, and of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import SPEC, finish
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded import engine
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.embedded.train import forward_backward
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.placement import rollout_memory, training_memory
from fakevllm_server.placement.memory_parts import MemoryPart
from fakevllm_server.placement.model_shape import FAMILIES, model_shape, read_model_shape
from fakevllm_server.placement.training_memory import (
    TrainingSetup,
    layer_bytes_per_token,
    training_parts,
)
from fakevllm_server.types.backend import Batch, Call

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 256,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
CLASSES: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in CLASSES),
    *((family, {"tie_word_embeddings": True}) for family in CLASSES),
    *((family, {"head_dim": 32}) for family in ("llama", "qwen3")),
    *((family, {"attention_bias": True}) for family in CLASSES),
    *((family, {"mlp_bias": True}) for family in CLASSES),
]


def built(family: str, **settings: Any) -> Any:
    config = CLASSES[family](**(SIZES | settings), attn_implementation="sdpa")
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_every_family_of_the_plan_is_compared_with_its_real_models() -> None:
    assert CLASSES.keys() == FAMILIES.keys()


@pytest.mark.parametrize(("family", "settings"), VARIANTS)
def test_a_shape_has_as_many_parameters_as_the_model_that_transformers_builds(
    family: str, settings: dict[str, Any]
) -> None:
    model = built(family, **settings)
    shape = model_shape(model.config.to_dict(), "config.json")
    assert shape.num_parameters == sum(weight.numel() for weight in model.parameters())
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
    assert shape.layer_parameters == layer
    assert shape.largest_tensor == max(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_trainer_holds_the_bytes_of_weights_gradients_and_moments_that_the_plan_names(
    lora_rank: int,
) -> None:
    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32)

    model = load().eval()
    trainer = PolicyTrainer(model, load)
    job = TrainJob(lora_rank=lora_rank, max_mismatch_k3=None)
    trainer.boot(job)
    call = Call("g", [5, 6, 7], [8, 9, 10], [-3.0] * 3, 0, 1.0, 1.0, 1.0)
    other = Call("g", [5, 6, 7], [9, 9, 9], [-3.0] * 3, 0, 1.0, -1.0, 1.0)
    gradients: dict[Any, int] = {}

    def record(weight: Any) -> None:
        gradients[weight] = weight.grad.nbytes

    for weight in model.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(record)
    finish(trainer.step(Batch(1, [call, other]), SPEC))
    moments = [
        value.nbytes
        for state in trainer.optimizer.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    ]
    shape = read_model_shape(DEMO_MODEL_DIR)
    parts = bytes_by_name(training_parts(shape, TrainingSetup(False, 1, 64, lora_rank=lora_rank)))
    assert parts["weights"] == sum(weight.nbytes for weight in model.parameters())
    assert parts["gradients"] == sum(gradients.values())
    assert parts["optimizer"] == sum(moments)


def bytes_by_name(parts: list[MemoryPart]) -> dict[str, int]:
    return {part.name: part.num_bytes for part in parts}


LARGER: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
}


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize(
    ("setup", "weights", "is_autocast"),
    [
        (TrainingSetup(False, 1, 1, compute_bytes=2), torch.float32, True),
        (TrainingSetup(False, 1, 1, compute_bytes=4), torch.float32, False),
        (TrainingSetup(True, 1, 1, compute_bytes=2), torch.bfloat16, False),
    ],
)
def test_a_layer_keeps_as_many_bytes_per_token_as_torch_saves_for_the_backward_pass(
    family: str, setup: TrainingSetup, weights: torch.dtype, is_autocast: bool
) -> None:
    def saved(num_layers: int, num_tokens: int) -> int:
        model = built(family, **LARGER, num_hidden_layers=num_layers).to(weights)
        return saved_bytes(model, num_tokens, is_autocast)

    def layer(num_tokens: int) -> int:
        return (saved(3, num_tokens) - saved(1, num_tokens)) // 2

    counted = (layer(192) - layer(64)) / 128
    shape = model_shape(built(family, **LARGER).config.to_dict(), "config.json")
    calculated = layer_bytes_per_token(shape, setup)
    assert calculated == pytest.approx(counted, rel=0.02)
    # What does not grow with the tokens are the bfloat16 copies of the weights.
    copies = layer(64) - 64 * counted
    assert copies == pytest.approx(2 * shape.layer_parameters if is_autocast else 0, rel=0.02)


def saved_bytes(model: Any, num_tokens: int, is_autocast: bool) -> int:
    """Return the bytes that a forward pass saves for the backward pass, without the weights."""
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            saved[pointer] = tensor
        return tensor

    ids = torch.arange(num_tokens)[None]
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_autocast),
    ):
        model.model(ids, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def copied_constants() -> Iterator[tuple[float, float]]:
    yield training_memory.MAX_LOGITS, forward_backward.MAX_LOGITS
    yield rollout_memory.EMBEDDED_CACHE_SHARE, engine.CACHE_MEMORY_SHARE
    yield rollout_memory.EMBEDDED_PREFIX_SHARE, engine.PREFIX_MEMORY_SHARE


def test_the_plan_copies_the_constants_of_modules_that_need_torch() -> None:
    assert all(copy == original for copy, original in copied_constants())


def test_the_config_of_the_demo_model_is_read_as_transformers_reads_it() -> None:
    config: Any = AutoConfig.from_pretrained(DEMO_MODEL_DIR)
    shape = read_model_shape(DEMO_MODEL_DIR)
    assert shape == model_shape(config.to_dict(), "config.json")
