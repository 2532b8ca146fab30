"""Check at start-up that an attention method gives the same results as the unchanged model.

A few random calls go through the model twice. First, they go one by one through the unchanged
model. Then they go through the model together, as a forest (trees of tokens) with this method. Some
calls have the same prompt. Two calls are equal. Some calls continue another call, as the next turn
of a conversation does. The log-probabilities of the two passes must agree, and so must the
gradients of a few weights.

The check of a method runs seven short forward and backward passes. This takes 0.05 s for the model
of `fakevllm demo`. On a GPU it takes as long as a training step on a thousand tokens. On a CPU with
a large model, it takes as long as reading all weights from memory about twenty times. This is less
than the first training step takes. The check of FlexAttention uses longer calls and includes the
compilation of the kernels. The first training step would need this compilation anyway.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.attention.flex import BLOCK
from fakevllm_server.backends.torch_forest.attention.transformers_hook import causal_model
from fakevllm_server.backends.torch_forest.autocast import compute_dtype
from fakevllm_server.backends.torch_forest.edge_log_probs import edge_log_probs
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.backends.torch_forest.supported_models import sharing_refusal
from fakevllm_server.forest import CallTokens, build_forest

TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 5e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}
"""Largest accepted relative difference for each dtype. A difference of log-probabilities is divided
by the largest log-probability, and a difference of gradients by the norm of the gradients. Each
limit is above the rounding errors of a deep model, and below the effect of a wrong position or
mask. The limit for float64 is not smaller, because norm layers compute in float32 even in a float64
model."""
NUM_CHECKED_WEIGHTS = 4
"""Number of weight tensors whose gradients are compared. The check uses the first trainable tensors
of the model, so their gradients go through all layers above them. One tensor is not enough, because
half of the tensors of a new LoRA adapter have a gradient of 0."""
MAX_WINDOW = 64
"""If the attention window has at most this many tokens, the check's calls are longer than the
window. For a longer window, such calls would need as much memory as a training step."""
SHORT = 9
"""Length of a prompt, in tokens, if the attention window is longer than MAX_WINDOW."""
WHOLE_BLOCKS = 3
"""Number of whole blocks of tokens in a prompt for `flex`, whose kernel computes block by block.
Later blocks attend to these blocks without a mask."""


@dataclass(frozen=True, slots=True)
class AttentionCheck:
    """Result of comparing an attention method with the unchanged model."""

    log_prob: float = 0.0
    """Largest difference between a token's log-probability with the attention method and with the
    unchanged model, relative to the largest log-probability."""
    gradient: float = 0.0
    """Norm of the difference between the gradients with the attention method and with the unchanged
    model, relative to the norm of the gradients; 0 if the model has no trainable weights."""
    fault: str | None = None
    """Why the attention method must not be used, as one clause. None if the method may be used."""


class CheckPasses:
    """The way in which the check runs a model and computes gradients. This class is for a model
    whose weights are all in this process."""

    def compute_dtype(self, model: Any) -> torch.dtype:
        return compute_dtype(model)

    def logits(self, model: Any, ids: Tensor) -> Tensor:
        """Return the logits of the unchanged model for a call with the token ids `ids`, [1,
        tokens]. The logits are [tokens, vocabulary]."""
        return causal_model(model)(input_ids=ids, use_cache=False).logits[0]

    def gradients(self, total: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients of `total`, one for each of the model weights `weights`. The
        gradient is 0 for a weight on which `total` does not depend."""
        return torch.autograd.grad(total, weights, allow_unused=True, materialize_grads=True)


PASSES = CheckPasses()


def check_sharing_attention(
    model: Any, attention: str, passes: CheckPasses = PASSES
) -> AttentionCheck:
    """Check an attention method that shares prefixes between calls, and return the result. If the
    model does not support prefix sharing, the field `fault` of the result says why. Otherwise the
    results of the method are compared with those of the unchanged model."""
    reason = sharing_refusal(model)
    if reason is not None:
        return AttentionCheck(fault=reason)
    return check_attention(model, attention, passes)


def check_attention(model: Any, attention: str, passes: CheckPasses = PASSES) -> AttentionCheck:
    """Compare the results of an attention method with those of the unchanged model, and return the
    result of the check. The method may be any method, including `rows`, which shares no prefixes.
    """
    try:
        log_prob, gradient = relative_differences(model, attention, passes)
    # A model or kernel that does not fit fails in its own code, with any exception.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return AttentionCheck(fault=f"attention {attention} fails on this model ({reason})")
    limit = TOLERANCE[passes.compute_dtype(model)]
    for name, difference in (("log-probabilities", log_prob), ("gradients", gradient)):
        # Negated, so that NaN fails too.
        if not difference <= limit:
            fault = (
                f"attention {attention} gives wrong {name} (off by {difference:.1e}, limit {limit})"
            )
            return AttentionCheck(log_prob, gradient, fault)
    return AttentionCheck(log_prob, gradient)


def relative_differences(
    model: Any, attention: str, passes: CheckPasses = PASSES
) -> tuple[float, float]:
    """Return two relative differences between an attention method and the unchanged model: the
    difference of the log-probabilities, and the difference of the gradients of a few weights."""
    causal = causal_model(model)
    calls = check_calls(causal.config.get_text_config(), attention)
    trained = (parameter for parameter in causal.parameters() if parameter.requires_grad)
    weights = list(islice(trained, NUM_CHECKED_WEIGHTS))
    with torch.enable_grad():
        # The plain model comes first, while it still has its original attention.
        expected, expected_gradients = _one_by_one(model, calls, weights, passes)
        plan = Plan.of(build_forest(calls), causal.device)
        actual = plan.flat(edge_log_probs(model, plan, attention))
        actual_gradients = _gradients(actual, _coefficients(len(actual)), weights, passes)
    log_prob = (actual - expected).abs().max() / expected.abs().max()
    return log_prob.item(), _relative_difference(actual_gradients, expected_gradients)


def _one_by_one(
    model: Any, calls: Sequence[CallTokens], weights: Sequence[Tensor], passes: CheckPasses
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return (log-probabilities, gradients) of the unchanged model. The log-probabilities have the
    shape [tokens], with the trained tokens of all calls. There is one gradient for each of
    `weights`. The calls go through the model one by one. Therefore only one call is in memory at a
    time."""
    log_probs: list[Tensor] = []
    gradients: Sequence[Tensor] = []
    coefficients = _coefficients(sum(end - start for call in calls for start, end in call.trained))
    for call in calls:
        log_prob = _plain_log_probs(model, call, passes)
        call_coefficients = coefficients[: len(log_prob)]
        coefficients = coefficients[len(log_prob) :]
        call_gradients = _gradients(log_prob, call_coefficients, weights, passes)
        sums = zip(gradients, call_gradients, strict=True)
        gradients = [one + other for one, other in sums] if gradients else call_gradients
        log_probs.append(log_prob.detach())
    return torch.cat(log_probs), gradients


def _coefficients(number: int) -> Tensor:
    """Return one random coefficient for each of `number` tokens. The check compares the gradients
    of Σ coefficient · log-probability, summed over the tokens. With random coefficients, errors at
    different tokens do not cancel each other out."""
    return torch.randn(number, generator=torch.Generator().manual_seed(0))


def _relative_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    if not expected:
        return 0.0
    difference = _norm([mine - reference for mine, reference in zip(actual, expected, strict=True)])
    # If no gradient reaches the weights in either case, both norms are 0, and 0 / 0 would fail.
    return 0.0 if difference == 0 else (difference / _norm(expected)).item()


def _gradients(
    log_prob: Tensor, coefficients: Tensor, weights: Sequence[Tensor], passes: CheckPasses
) -> Sequence[Tensor]:
    """Return the gradients of Σ `coefficients` · `log_prob`, one for each of the model weights
    `weights`. The gradient is 0 for a weight on which the sum does not depend."""
    if not (log_prob.requires_grad and weights):
        return [torch.zeros_like(weight) for weight in weights]
    return passes.gradients((log_prob * coefficients.to(log_prob)).sum(), weights)


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all values of all tensors, computed in at least float32. A float64 copy is
    avoided, because it would need gigabytes for an embedding, and some devices do not support
    float64."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors]).norm()


def check_calls(config: Any, attention: str) -> list[CallTokens]:
    """Return random calls that are long enough to check the given attention method.

    The method `flex` computes attention between blocks of tokens. The calls for `flex` span several
    query blocks. They also have key blocks to which every query of the later blocks attends.
    """
    rng = random.Random(0)
    window = getattr(config, "sliding_window", None) or 0
    length = window + 3 if window <= MAX_WINDOW else SHORT
    branch = 0
    if attention == "flex":
        length, branch = WHOLE_BLOCKS * BLOCK + SHORT, BLOCK

    def random_ids(number: int) -> list[int]:
        return [rng.randrange(config.vocab_size) for _ in range(number)]

    prompt, answer = random_ids(length), random_ids(5 + branch)
    second_prompt = [*prompt, *answer, *random_ids(3)]
    other_answer = [*answer[:2], *random_ids(4 + branch)]
    drifted_prompt = [*prompt, *answer[:3], *random_ids(4)]
    return [
        CallTokens.of(prompt, answer),
        CallTokens.of(prompt, other_answer),
        CallTokens.of(prompt, answer),
        CallTokens.of(second_prompt, random_ids(4)),
        CallTokens.of(second_prompt, random_ids(6 + branch)),
        CallTokens.of(drifted_prompt, random_ids(2)),
    ]


def _plain_log_probs(model: Any, call: CallTokens, passes: CheckPasses) -> Tensor:
    """Return the log-probabilities of a call's trained tokens (shape [tokens]), computed by the
    unchanged model."""
    ids = torch.tensor([list(call.ids)], device=causal_model(model).device)
    logits = passes.logits(model, ids)[:-1]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / call.temperature
    log_probs = wide.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([log_probs[start - 1 : end - 1] for start, end in call.trained])
