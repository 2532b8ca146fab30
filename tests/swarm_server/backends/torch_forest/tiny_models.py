"""Models of a few thousand random weights in float64, and their results for single calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fakevllm_server.forest import CallTokens
from fakevllm_server.types.token_masks import unpacked

VOCAB = 11
WINDOW = 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Much larger than the usual 0.02: with a sharp attention, an error changes the results visibly.
    "initializer_range": 0.4,
}
SLIDING: dict[str, Any] = {"sliding_window": WINDOW}


def llama(**settings: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**(SIZES | settings)))


def mistral() -> Any:
    """Return a model with a window in every layer."""
    return MistralForCausalLM(MistralConfig(**SIZES, **SLIDING))


def qwen2() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def qwen3() -> Any:
    """Return a model with a window only in the second layer."""
    hybrid = {"use_sliding_window": True, "max_window_layers": 1, **SLIDING}
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **hybrid, head_dim=4))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def build_model(make: Callable[[], Any]) -> Any:
    """Return a model that computes in float64 throughout."""
    torch.manual_seed(0)
    model = make().double().eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            # The norm of transformers rounds to float32, and limits the precision of gradients.
            module.forward = _exact_norm(module)
    return model


def _exact_norm(module: Any) -> Callable[[Tensor], Tensor]:
    def forward(hidden: Tensor) -> Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return module.weight * hidden * torch.rsqrt(variance + module.variance_epsilon)

    return forward


def naive(model: Any, call: CallTokens) -> Tensor:
    """Return the plain model's log-probabilities of the call alone, [trained tokens]."""
    if not call.trained:
        return torch.zeros(0, dtype=torch.float64)
    ids = torch.tensor([list(call.ids)])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1] / call.temperature
    logits = mask_to_sets(logits, call)
    log_probs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([log_probs[start - 1 : end - 1] for start, end in call.trained])


def mask_to_sets(logits: Tensor, call: CallTokens) -> Tensor:
    """Set the logits [tokens - 1, vocabulary] of tokens outside the next token's allowed set to
    -inf."""
    rows: list[Tensor] = []
    for row, allowed in zip(logits, (call.allowed_sets or [None] * len(call.ids))[1:], strict=True):
        bits = -1 if allowed is None else int.from_bytes(unpacked(allowed), "little")
        kept = torch.tensor([bool(bits >> id & 1) for id in range(len(row))])
        rows.append(torch.where(kept, row, torch.tensor(float("-inf"), dtype=row.dtype)))
    return torch.stack(rows) if rows else logits


def coupled_loss(log_probs: Sequence[Tensor]) -> Tensor:
    """Return a loss like GSPO's: a clipped ratio of the whole sequence, with an advantage for each
    call."""
    terms: list[Tensor] = []
    for index, log_prob in enumerate(log_probs):
        if not len(log_prob):
            continue
        advantage = (-1.0, 0.5, 2.0)[index % 3]
        behaviour = torch.linspace(-2.2, -1.6, len(log_prob), dtype=torch.float64)
        ratio = (log_prob - behaviour).mean().exp()
        terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.5, 1.5) * advantage))
    return torch.stack(terms).mean() if terms else torch.zeros((), dtype=torch.float64)


def gradient_of(model: Any, loss: Tensor) -> Tensor:
    """Return the gradient of all weights, flat, with zeros for weights that the loss does not
    use."""
    weights = list(model.parameters())
    if not loss.requires_grad:
        return torch.cat([torch.zeros_like(weight).flatten() for weight in weights])
    gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in gradients])


def gathered_gradient(model: Any) -> Tensor:
    """Return the accumulated gradients of all weights, flat, and clear them."""
    gradients = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad
        for weight in model.parameters()
    ]
    model.zero_grad()
    return torch.cat([grad.flatten() for grad in gradients])
