"""The shape of a model is read from its config.json, or refused in one line. The numbers of
parameters are compared with real models in `backends/placement/test_real_sizes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from swarm_server.placement.plans import CONFIG, shape, small_shape

from fakevllm_runtime.errors import ConfigError
from fakevllm_server.placement.model_shape import model_shape, read_model_shape


def test_published_models_have_the_published_numbers_of_parameters() -> None:
    assert small_shape().num_parameters == 596_049_920  # Qwen3-0.6B
    assert shape().num_parameters == 7_615_616_512  # Qwen2.5-7B


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "qwen3_moe"}, "'qwen3_moe' cannot be calculated; known are llama, mistral"),
        ({"model_type": None}, "the model type None cannot be calculated"),
        ({"hidden_size": None}, "hidden_size must be a number of 1 or more, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a number of 1 or more, got 0"),
        ({"vocab_size": "many"}, "vocab_size must be a number of 1 or more, got 'many'"),
    ],
)
def test_a_model_whose_size_is_unknown_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_shape(CONFIG | settings, "config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot be read"), ("{", "is not valid JSON"), ("[]", "is not a JSON object")],
)
def test_an_unusable_config_json_is_one_line(
    text: str | None, message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.json {message}.*--model"):
        read_model_shape(tmp_path)


def test_adapters_are_counted_for_the_named_layers_only() -> None:
    model = shape()
    everything = model.adapter_parameters(8, "all-linear")
    attention = model.adapter_parameters(8, "q_proj, self_attn.k_proj,v_proj,o_proj")
    mlp = model.adapter_parameters(8, "gate_proj,up_proj,down_proj")
    assert everything == attention + mlp
    assert model.adapter_parameters(8, "lm_head") == 8 * (3584 + 152064)
    with pytest.raises(ConfigError, match=r"target_modules names 'qproj'.* it has q_proj, k_proj"):
        model.adapter_parameters(8, "qproj")
