"""Check that LoRA adapters fit a model. The check runs before the workers start, so that a mistake
of the user is reported on one line."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from fakevllm_server.backends.embedded.lora import target_layers
from fakevllm_server.backends.training.lora_settings import LoraSettings
from fakevllm_server.types.backend import BackendRefused


def check_adapters(config: PreTrainedConfig, lora: LoraSettings) -> None:
    """Check that the model has the layers that `lora.target_modules` names. Raises BackendRefused
    if it does not. The check uses a model without weights, so it takes no memory."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError:  # transformers raises it for a config of another kind of model
        raise BackendRefused(
            f"the verl trainer inserts adapters into causal language models only, and this "
            f"model is of type {config.model_type}: take lora_rank out"
        ) from None
    target_layers(model, lora.target_modules)
