from __future__ import annotations

import pytest
from transformers import AutoConfig, T5Config

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.training.lora_settings import LoraSettings
from fakevllm_server.backends.verl.adapter_check import check_adapters
from fakevllm_server.types.backend import BackendRefused


def test_layers_that_the_model_has_pass_the_check() -> None:
    config = AutoConfig.from_pretrained(DEMO_MODEL_DIR)
    check_adapters(config, LoraSettings(4, 8, "q_proj, down_proj"))


@pytest.mark.parametrize("targets", ["q_prj", "lm_head"])
def test_layers_that_cannot_have_an_adapter_are_refused(targets: str) -> None:
    config = AutoConfig.from_pretrained(DEMO_MODEL_DIR)
    with pytest.raises(BackendRefused, match="target_modules names"):
        check_adapters(config, LoraSettings(4, 8, targets))


def test_a_model_that_is_no_causal_language_model_is_refused_by_its_type() -> None:
    with pytest.raises(BackendRefused, match="model is of type t5: take lora_rank out"):
        check_adapters(T5Config(), LoraSettings(4, 8, "all-linear"))
