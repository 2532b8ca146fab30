from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import decode_request, load, plain_logprobs
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fakevllm_server.backends.embedded.decode.decoder import Decoder, cache_shape
from fakevllm_server.backends.embedded.decode.fused_forward import fused_forward
from fakevllm_server.backends.embedded.decode.kv_cache import CachedPrefix, KvCache
from fakevllm_server.backends.embedded.decode.request import DecodeRequest
from fakevllm_server.backends.embedded.weights import copy_weights
from fakevllm_server.types.sampling import Sampling

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, scaled rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3, as many key heads": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 16, "num_key_value_heads": 4},
    ),
}


def llama(**settings: Any) -> Any:
    """Return a small Llama with other settings."""
    return LlamaForCausalLM(LlamaConfig(**(SIZES | settings)))


def make_model(name: str, seed: int = 0) -> Any:
    """Return a random model. Norms and biases are random too, so that a missing one shows."""
    torch.manual_seed(seed)
    model_class, config_class, settings = MODELS[name]
    model = model_class(config_class(**(SIZES | settings))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@torch.inference_mode()
def decoded_logprobs(model: PreTrainedModel, fused: Any, rows: list[list[int]]) -> torch.Tensor:
    """Return the log-probabilities after the last id of each row, [rows, vocabulary]. The ids go
    through the fused forward pass one by one; shorter rows repeat their last id."""
    cache = KvCache(cache_shape(model), len(rows), max_length=1024, max_cells=1 << 20)
    for _ in rows:
        cache.add_row()
    logits = torch.empty(0)
    for step in range(max(map(len, rows))):
        ats = [min(step, len(ids) - 1) for ids in rows]
        positions = cache.begin(ats)
        ids = torch.tensor([ids[at] for ids, at in zip(rows, ats, strict=True)])
        logits = fused.logits(ids, positions, cache)
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize("name", MODELS)
def test_the_fused_forward_pass_gives_the_models_own_logprobs(name: str) -> None:
    model = make_model(name)
    rows = [[5, 9, 3, 60, 41, 7], [8, 2], [1, 1, 1, 4]]
    expected = torch.stack([plain_logprobs(model, ids)[-1] for ids in rows])

    fused = fused_forward(model)

    assert fused is not None
    torch.testing.assert_close(decoded_logprobs(model, fused, rows), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_others", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_weights_copied_into_the_model_are_in_use_at_once(name: str, num_others: int) -> None:
    model, new = make_model(name), make_model(name, seed=1)
    fused = fused_forward(model)
    for _ in range(num_others):
        fused_forward(model)
    names = set(model.state_dict())

    copy_weights(new, model)

    assert set(model.state_dict()) == names
    rows = [[5, 9, 3]]
    torch.testing.assert_close(
        decoded_logprobs(model, fused, rows),
        plain_logprobs(new, rows[0])[-1:],
        atol=1e-5,
        rtol=1e-5,
    )


def test_positions_beyond_the_first_table_of_angles_are_right() -> None:
    model = make_model("llama")
    ids = [number % 64 for number in range(300)]

    logprobs = decoded_logprobs(model, fused_forward(model), [ids])

    torch.testing.assert_close(logprobs, plain_logprobs(model, ids)[-1:], atol=2e-5, rtol=2e-5)


@torch.inference_mode()
def logprobs_of_rows(decoder: Decoder) -> torch.Tensor:
    return torch.log_softmax(decoder.logits(), dim=-1)


def check_rows(decoder: Decoder, model: PreTrainedModel) -> None:
    """Compare the log-probabilities after each row with the model's own, in two iterations between
    which the rows get different tokens."""
    for _ in range(2):
        expected = torch.stack([plain_logprobs(model, row.ids)[-1] for row in decoder.rows])
        torch.testing.assert_close(logprobs_of_rows(decoder), expected, atol=1e-5, rtol=1e-5)
        for index, row in enumerate(decoder.rows):
            row.ids.append(11 + index)


@torch.inference_mode()
def prefilled(
    decoder: Decoder, requests: list[DecodeRequest], piece: int
) -> dict[bytes, CachedPrefix]:
    prefill = decoder.start_prefill({one.prefix_key: one.prefix for one in requests})
    while not prefill.advance(piece):
        pass
    return prefill.result()


@pytest.mark.parametrize("piece", [1, 6, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_a_prefill_in_pieces_gives_the_models_own_logprobs(name: str, piece: int) -> None:
    model = make_model(name)
    cache = KvCache(cache_shape(model), 4, max_length=1024, max_cells=1 << 20)
    decoder = Decoder(model, cache, frozenset())
    requests = [decode_request(range(begin, begin + 13), 9, Sampling()) for begin in (3, 20)]
    requests.append(decode_request([5, 6, 8], 9, Sampling()))

    for key, prefix in prefilled(decoder, requests, piece).items():
        with torch.inference_mode():
            decoder.join([one for one in requests if one.prefix_key == key], [prefix])

    check_rows(decoder, model)


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_share_a_prompt_have_the_models_own_logprobs(name: str) -> None:
    model = make_model(name)
    cache = KvCache(cache_shape(model), 8, max_length=1024, max_cells=1 << 20)
    decoder = Decoder(model, cache, frozenset())
    prompts = [[number % 64 for number in range(length)] for length in (140, 160)]
    requests = [decode_request(prompts[index % 2], 9, Sampling()) for index in range(5)]
    requests.append(decode_request([5, 6, 8], 9, Sampling()))

    for key, prefix in prefilled(decoder, requests, 50).items():
        with torch.inference_mode():
            decoder.join([one for one in requests if one.prefix_key == key], [prefix])

    assert [one.num_rows for one in cache.shared_rows] == [3, 2]
    check_rows(decoder, model)
    with torch.inference_mode():
        decoder.drop([0])
    check_rows(decoder, model)


def test_other_models_are_not_fused(tiny_folder: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)
    dynamic = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    wrapped: Any = make_model("llama")
    wrapped.model.forward = wrapped.model.forward

    assert fused_forward(GPT2LMHeadModel(config)) is None
    assert fused_forward(make_model("llama").to(torch.bfloat16)) is None
    assert fused_forward(llama(mlp_bias=True)) is None
    assert fused_forward(llama(hidden_act="gelu")) is None
    assert fused_forward(llama(rope_parameters=dynamic)) is None
    assert fused_forward(wrapped) is None
    assert fused_forward(load(tiny_folder)) is not None
