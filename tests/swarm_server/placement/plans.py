"""Deployments for tests of the plan: a small model, and the numbers that a test changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fakevllm_server.placement.cluster_section import ClusterSection
from fakevllm_server.placement.memory_parts import GIB
from fakevllm_server.placement.memory_plan import Deployment
from fakevllm_server.placement.model_shape import ModelShape, model_shape
from fakevllm_server.placement.rollout_memory import RolloutSetup
from fakevllm_server.placement.training_memory import TrainingSetup

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
"""A model of 7.6 B parameters."""


def shape(**settings: Any) -> ModelShape:
    return model_shape(CONFIG | settings, "config.json")


def small_shape() -> ModelShape:
    """Return the shape of a model of 0.6 B parameters."""
    return shape(
        model_type="qwen3",
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        tie_word_embeddings=True,
    )


def medium_shape() -> ModelShape:
    """Return the shape of a model of 3 B parameters."""
    return shape(
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        intermediate_size=11008,
        tie_word_embeddings=True,
    )


def with_verl(
    model: ModelShape | None = None,
    *,
    memory_gib: float = 79,
    tensor_parallel: int = 2,
    training_gpus: int = 6,
    pass_tokens: int = 8192,
    colocate: str = "none",
    max_model_len: int = 8192,
    utilization: float = 0.92,
) -> Deployment:
    """Return a deployment with vLLM and verl on GPUs of `memory_gib`."""
    cluster = ClusterSection(
        gpus_per_node=4096,
        training_gpus=training_gpus,
        tensor_parallel=tensor_parallel,
        colocate=colocate,
        gpu_memory_gib=memory_gib,
    )
    rollout = RolloutSetup(
        int(memory_gib * GIB), max_model_len, tensor_parallel, utilization=utilization
    )
    training = TrainingSetup(True, training_gpus, pass_tokens, is_recomputed=True)
    return Deployment(model or shape(), cluster, rollout, training)


def with_torch(model: ModelShape | None = None, **numbers: Any) -> Deployment:
    """Return a deployment with vLLM and the embedded trainer on one GPU, in memory together."""
    chosen: dict[str, Any] = {
        "tensor_parallel": 1,
        "training_gpus": 1,
        "colocate": "shared",
        "utilization": 0.4,
    }
    deployment = with_verl(model or small_shape(), **(chosen | numbers))
    training = replace(deployment.training, is_verl=False, is_recomputed=False)
    return replace(deployment, training=training)
