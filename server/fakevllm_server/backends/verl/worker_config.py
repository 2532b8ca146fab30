"""The configuration of verl's training worker, as the server's verl trainer uses it."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)

from fakevllm_server.backends.training.lora_settings import LoraSettings

BETAS = (0.9, 0.95)
"""AdamW's betas, equal to those of the embedded trainer."""
FLOAT32_EVERYWHERE = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def worker_config(
    model: Path,
    *,
    is_cpu: bool,
    seed: int,
    lora: LoraSettings | None = None,
    gradient_checkpointing: bool | None = None,
    cpu_offload: bool = False,
) -> TrainingWorkerConfig:
    """Return the configuration of verl's worker. The weights and the optimizer's moments are
    float32. On a CPU, the model computes in float32. On an accelerator, it computes in bfloat16,
    which is verl's default.

    If `gradient_checkpointing` is None, it is on for accelerators and off for CPUs. With
    `cpu_offload`, the weights and the optimizer's moments are on an accelerator only while a worker
    needs them there.
    """
    # Packing needs the kernels of FlashAttention. Without them, rows are padded, which is slower
    # and gives the same result.
    has_flash_attention = not is_cpu and importlib.util.find_spec("flash_attn") is not None
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=str(model),
            load_tokenizer=False,
            use_remove_padding=has_flash_attention,
            enable_gradient_checkpointing=(
                not is_cpu if gradient_checkpointing is None else gradient_checkpointing
            ),
            override_config={
                "attn_implementation": "flash_attention_2" if has_flash_attention else "sdpa"
            },
            **({} if lora is None else _lora_config(lora)),
        ),
        engine_config=_engine_config(is_cpu=is_cpu, seed=seed, cpu_offload=cpu_offload),
        # Each step passes its learning rate and weight decay. `boot` sets the gradient clipping.
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-6, betas=BETAS, weight_decay=0.0, lr_warmup_steps=0, total_training_steps=1
        ),
        # Never used: the trainer has checkpoints of its own.
        checkpoint_config=CheckpointConfig(),
    )


def _lora_config(lora: LoraSettings) -> dict[str, Any]:
    """Return verl's settings for LoRA. The worker itself inserts the adapters, so it does not use
    `target_modules`."""
    return {
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": lora.target_modules,
    }


def _engine_config(*, is_cpu: bool, seed: int, cpu_offload: bool) -> FSDPEngineConfig:
    precision: dict[str, Any] = {"mixed_precision": FLOAT32_EVERYWHERE, "dtype": "float32"}
    return FSDPEngineConfig(
        strategy="fsdp2",
        model_dtype="fp32",
        use_torch_compile=False,
        # Otherwise each worker keeps the gradients of all weights until the step's last pass.
        use_no_sync_for_gradient_accumulation=False,
        # The activations of the entropy would use much of an accelerator's memory.
        entropy_checkpointing=not is_cpu,
        use_dynamic_bsz=True,
        seed=seed,
        param_offload=cpu_offload,
        optimizer_offload=cpu_offload,
        **(precision if is_cpu else {}),
    )
