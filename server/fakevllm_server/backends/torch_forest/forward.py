"""From a model and a planned piece to the log-probability of every edge.

    log_prob[e] = log_softmax(logits[head of e] / temperature of e)[token of e]

where a head's logits outside the set its token was chosen from are -inf.
Each edge once; `plan.flat` and `plan.per_call` give the calls theirs back, with multiplicity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fakevllm_server.backends.torch_forest.allowed_sets import Allowed
from fakevllm_server.backends.torch_forest.attentions import ATTENTIONS
from fakevllm_server.backends.torch_forest.plan import Plan
from fakevllm_server.backends.torch_forest.transformers_attention import causal_model


class EdgeValues(NamedTuple):
    log_prob: Tensor
    """[edges], at least float32"""
    entropy: Tensor | None
    """[edges] In nats, of the distribution an edge's token was chosen from; None if not asked
    for."""


def edge_values(
    model: Any,
    plan: Plan,
    attention: str,
    *,
    with_entropy: bool = False,
    entropy_trains: bool = True,
    max_logits: int | None = None,
) -> EdgeValues:
    """One forward pass; `attention` is a name in ATTENTIONS. Where no gradient goes through the
    entropy, say so: it would hold logits that nothing frees. At most `max_logits` logits (heads
    times vocabulary) are held at a time, for which each is computed once more in the backward.

    A piece that trains nothing costs nothing, and its empty tensors have no gradient.
    """
    if not plan.num_edges:
        empty = torch.zeros(0, device=plan.device)
        return EdgeValues(empty, empty if with_entropy else None)
    hidden = ATTENTIONS[attention](model, plan)
    asked = (with_entropy, entropy_trains)
    chunks = _chunks(model, len(hidden), max_logits)
    given = [_given(model, plan, hidden, chunk, asked) for chunk in chunks]
    if len(given) == 1:
        values: list[Any] = [_of_heads(*given[0])]
    else:
        values = [checkpoint(_of_heads, *one, use_reentrant=False) for one in given]
    log_probs, entropies = zip(*values, strict=True)
    return EdgeValues(torch.cat(log_probs), torch.cat(entropies) if with_entropy else None)


def edge_log_probs(
    model: Any, plan: Plan, attention: str, *, max_logits: int | None = None
) -> Tensor:
    """[edges]"""
    return edge_values(model, plan, attention, max_logits=max_logits).log_prob


def _chunks(model: Any, num_heads: int, max_logits: int | None) -> list[tuple[int, int]]:
    """Runs of heads [first, last)."""
    size = num_heads
    if max_logits is not None:
        size = max(1, max_logits // causal_model(model).config.get_text_config().vocab_size)
    return [(first, min(first + size, num_heads)) for first in range(0, num_heads, size)]


def _given(
    model: Any, plan: Plan, hidden: Tensor, chunk: tuple[int, int], asked: tuple[bool, bool]
) -> tuple[Any, ...]:
    """What `_of_heads` takes: a run of heads, and their edges."""
    first, last = chunk
    edges = plan.forest.edges
    begin, end = edges.head_start[first], edges.head_start[last]
    return (
        causal_model(model).get_output_embeddings(),
        causal_model(model).config.get_text_config(),
        hidden[first:last],
        plan.head_temperature[first:last],
        Allowed(edges.sets, edges.head_set[first:last]),
        plan.edge_head[begin:end] - first,
        plan.edge_token[begin:end],
        *asked,
    )


def _of_heads(
    lm_head: Any,
    config: Any,
    hidden: Tensor,
    temperature: Tensor,
    allowed: Allowed,
    edge_head: Tensor,
    edge_token: Tensor,
    with_entropy: bool,
    entropy_trains: bool,
) -> tuple[Tensor, Tensor]:
    """[edges] log-probabilities and entropies, these empty if not asked for."""
    logits = _finished(config, lm_head(hidden))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if (temperature != 1).any():
        logits = logits / temperature.to(logits)[:, None]
    outside = allowed.outside(logits)
    if outside is not None:
        logits = logits.masked_fill(outside, float("-inf"))
    total = logits.logsumexp(-1)
    log_prob = logits[edge_head, edge_token] - total.index_select(0, edge_head)
    if not with_entropy:
        return log_prob, log_prob.new_zeros(0)
    with torch.set_grad_enabled(entropy_trains and torch.is_grad_enabled()):
        share = (logits - total[:, None]).exp()
        if outside is not None:
            logits = logits.masked_fill(outside, 0.0)  # their share is 0, and 0 times -inf is not
        entropy = total - (share * logits).sum(-1)
        entropy = entropy.index_select(0, edge_head)
    return log_prob, entropy


def _finished(config: Any, logits: Tensor) -> Tensor:
    """What models do to logits behind their LM head, by their configs' own names. Others are found
    out by the self-check."""
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits
