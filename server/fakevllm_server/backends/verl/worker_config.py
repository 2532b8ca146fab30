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

BETAS = (0.9, 0.95)
"""AdamW's betas, equal to those of the embedded trainer."""
FLOAT32_EVERYWHERE = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def worker_config(model: Path, *, is_cpu: bool, seed: int) -> TrainingWorkerConfig:
    """Return the configuration of verl's worker. The weights and the optimizer's moments are
    float32. On a CPU, the model computes in float32. On an accelerator, it computes in bfloat16,
    which is verl's default."""
    # Packing needs the kernels of FlashAttention. Without them, rows are padded, which is slower
    # and gives the same result.
    has_flash_attention = not is_cpu and importlib.util.find_spec("flash_attn") is not None
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=str(model),
            load_tokenizer=False,
            use_remove_padding=has_flash_attention,
            enable_gradient_checkpointing=not is_cpu,
            override_config={
                "attn_implementation": "flash_attention_2" if has_flash_attention else "sdpa"
            },
        ),
        engine_config=_engine_config(is_cpu=is_cpu, seed=seed),
        # Each step passes its learning rate and weight decay. `boot` sets the gradient clipping.
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-6, betas=BETAS, weight_decay=0.0, lr_warmup_steps=0, total_training_steps=1
        ),
        checkpoint_config=CheckpointConfig(),
    )


def _engine_config(*, is_cpu: bool, seed: int) -> FSDPEngineConfig:
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
        **(precision if is_cpu else {}),
    )
