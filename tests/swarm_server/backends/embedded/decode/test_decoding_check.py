from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import load
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from fakevllm_server.backends.embedded.decode.decoding_check import check_decoding
from fakevllm_server.types.backend import BackendError


def without(model: PreTrainedModel, argument: str) -> PreTrainedModel:
    """Return the model with a forward pass that ignores one argument."""
    network: Any = model
    hearing = network.forward

    def deaf(**arguments: Any) -> Any:
        return hearing(**(arguments | {argument: None}))

    network.forward = deaf
    return model


def test_models_that_decode_correctly_pass(tiny_folder: Path, demo_folder: Path) -> None:
    check_decoding(load(tiny_folder), 256)
    assert check_decoding(load(demo_folder), 512).is_fused


def test_a_model_that_the_fused_forward_pass_computes_wrongly_uses_its_own(
    demo_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = load(demo_folder)
    model.config.rms_norm_eps = 1.0  # only the fused pass reads it after the model was made

    assert not check_decoding(model, 512).is_fused

    assert "the fused forward pass decodes this model wrongly" in capsys.readouterr().err


def test_a_model_with_learned_positions_passes_the_decoding_check() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.5
    )

    check_decoding(GPT2LMHeadModel(config).eval(), 64)


def test_a_model_on_which_the_fused_forward_pass_fails_uses_its_own(
    demo_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = load(demo_folder)
    model.config.num_key_value_heads *= 3  # only the fused pass reads it after the model was made

    assert not check_decoding(model, 512).is_fused

    assert "the fused forward pass cannot decode this model (" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["position_ids", "attention_mask"])
def test_a_model_that_ignores_positions_or_masks_is_refused(
    tiny_folder: Path, argument: str
) -> None:
    with pytest.raises(BackendError, match=r"decodes this model wrongly.*choose another --model"):
        check_decoding(without(load(tiny_folder), argument), 256)


def test_a_model_that_cannot_use_the_cache_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(BackendError, match=r"cannot decode this model.*choose another --model"):
        check_decoding(without(load(tiny_folder), "past_key_values"), 256)
