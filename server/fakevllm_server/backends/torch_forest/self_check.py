"""Does sharing prefixes give what the model itself gives? Asked at start-up, so that no step trains
on something else.

A few random calls with siblings, a duplicate and a next turn go through the forest, and one by one
through the model as it is. Log-probabilities and a gradient through all layers must agree.

A way costs seven short passes and their backwards: 0.05 s on the demo model, and on a GPU what a
step of a thousand tokens does. Calls for FlexAttention are longer, and its kernels are compiled
then, which the first step would do otherwise. A large model on a CPU reads its weights some twenty
times, which is still less than its first step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.flex import BLOCK
from fakevllm_server.backends.torch_forest.forward import edge_log_probs
from fakevllm_server.backends.torch_forest.plan import Plan
from fakevllm_server.backends.torch_forest.precision import compute_dtype
from fakevllm_server.backends.torch_forest.supported_models import sharing_refusal
from fakevllm_server.backends.torch_forest.transformers_attention import causal_model
from fakevllm_server.forest import CallTokens, build_forest

TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 5e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}
"""Of the largest log-probability, and of the gradient's norm: above the rounding of a deep model,
below a wrong position or mask. Layers norm in float32 even where the model is float64."""
WATCHED = 4
"""Weights whose gradients are compared, the first that train: with all layers above them. One would
not do, for the gradient of half of a fresh adapter is 0."""
MAX_WINDOW = 64
"""Tokens. A longer window is not outgrown here, for that would take a step's memory."""
SHORT = 9
"""Tokens of a prompt that outgrows nothing."""
WHOLE_BLOCKS = 3
"""Of a prompt for a kernel that goes by blocks: those below see them unmasked."""


@dataclass(frozen=True, slots=True)
class AttentionCheck:
    log_prob: float = 0.0
    """The largest difference, relative to the largest log-probability."""
    gradient: float = 0.0
    """The norm of the difference, relative to the gradient's; 0 where nothing is trained."""
    fault: str | None = None
    """Why prefixes must not be shared, as one clause; None if they may."""


def check(model: Any, attention: str) -> AttentionCheck:
    """Of a way that merges."""
    reason = sharing_refusal(model)
    return check_attention(model, attention) if reason is None else AttentionCheck(fault=reason)


def check_attention(model: Any, attention: str) -> AttentionCheck:
    """Also for a way that shares nothing."""
    try:
        log_prob, gradient = differences(model, attention)
    # A model or kernel that does not fit fails in its own code, with any exception.
    except Exception as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        return AttentionCheck(fault=f"attention {attention} fails on this model ({told})")
    limit = TOLERANCE[compute_dtype(model)]
    for what, found in (("log-probabilities", log_prob), ("gradients", gradient)):
        # Written so that what is not a number fails too.
        if not found <= limit:
            fault = f"attention {attention} gives wrong {what} (off by {found:.1e}, limit {limit})"
            return AttentionCheck(log_prob, gradient, fault)
    return AttentionCheck(log_prob, gradient)


def differences(model: Any, attention: str) -> tuple[float, float]:
    """Of the log-probabilities and of a gradient, relative."""
    causal = causal_model(model)
    calls = self_check_calls(causal.config.get_text_config(), attention)
    trained = (parameter for parameter in causal.parameters() if parameter.requires_grad)
    watched = list(islice(trained, WATCHED))
    with torch.enable_grad():
        # First, while the model still has the attention it came with.
        plain, of_plain = _one_by_one(causal, calls, watched)
        plan = Plan.of(build_forest(calls), causal.device)
        ours = plan.flat(edge_log_probs(model, plan, attention))
        of_ours = _gradients(ours, _weights(len(ours)), watched)
    log_prob = (ours - plain).abs().max() / plain.abs().max()
    return log_prob.item(), _relative(of_ours, of_plain)


def _one_by_one(
    causal: Any, calls: Sequence[CallTokens], watched: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    """Log-probabilities and gradients; no more than one call is in memory at a time."""
    found: list[Tensor] = []
    gradients = [torch.zeros_like(weight) for weight in watched]
    weights = _weights(sum(end - start for call in calls for start, end in call.trained))
    for call in calls:
        log_prob = _plain(causal, call)
        own, weights = weights[: len(log_prob)], weights[len(log_prob) :]
        for total, one in zip(gradients, _gradients(log_prob, own, watched), strict=True):
            total += one
        found.append(log_prob.detach())
    return torch.cat(found), gradients


def _weights(number: int) -> Tensor:
    """Of the tokens in a sum whose gradient is taken: random, so that nothing cancels."""
    return torch.randn(number, generator=torch.Generator().manual_seed(0))


def _relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    if not expected:
        return 0.0
    pairs = zip(found, expected, strict=True)
    difference = _norm([one - other for one, other in pairs])
    # Where none reaches them either way, nothing differs; 0 by 0 would say that all does.
    return 0.0 if difference == 0 else (difference / _norm(expected)).item()


def _gradients(log_prob: Tensor, weights: Tensor, watched: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of their weighted sum; zeros where none reaches a watched weight."""
    if not (log_prob.requires_grad and watched):
        return [torch.zeros_like(weight) for weight in watched]
    total = (log_prob * weights.to(log_prob)).sum()
    return torch.autograd.grad(total, watched, allow_unused=True, materialize_grads=True)


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Of all of them as one. Not by a copy in float64: an embedding's would take gigabytes, and not
    every device has that."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack([torch.linalg.vector_norm(one, dtype=wide) for one in tensors]).norm()


def self_check_calls(config: Any, attention: str) -> list[CallTokens]:
    """Long enough for what the way does: blocks that are seen whole, and several that ask."""
    rng = random.Random(0)
    window = getattr(config, "sliding_window", None) or 0
    length = window + 3 if window <= MAX_WINDOW else SHORT
    branch = 0
    if attention == "flex":
        length, branch = WHOLE_BLOCKS * BLOCK + SHORT, BLOCK

    def some(number: int) -> list[int]:
        return [rng.randrange(config.vocab_size) for _ in range(number)]

    prompt, answer = some(length), some(5 + branch)
    second_prompt = [*prompt, *answer, *some(3)]
    other, drifted = [*answer[:2], *some(4 + branch)], [*prompt, *answer[:3], *some(4)]
    return [
        CallTokens.of(prompt, answer),
        CallTokens.of(prompt, other),
        CallTokens.of(prompt, answer),
        CallTokens.of(second_prompt, some(4)),
        CallTokens.of(second_prompt, some(6 + branch)),
        CallTokens.of(drifted, some(2)),
    ]


def _plain(causal: Any, call: CallTokens) -> Tensor:
    """The log-probabilities of its trained tokens."""
    ids = torch.tensor([list(call.ids)], device=causal.device)
    logits = causal(input_ids=ids, use_cache=False).logits[0, :-1]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / call.temperature
    found = wide.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([found[start - 1 : end - 1] for start, end in call.trained])
