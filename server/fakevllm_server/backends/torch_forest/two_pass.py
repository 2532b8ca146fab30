"""Batches whose forests do not fit memory at once, for losses that need all of them.

The loss is a function of the edges' log-probabilities l_e alone, so its gradient is

    Σ_e c_e · ∇l_e     with  c_e = ∂loss/∂l_e

Pass 1 computes all l_e without a graph, the loss of these vectors gives every c_e, and pass 2 goes
backward through Σ c_e·l_e piece by piece. That is exact for losses that couple the tokens of a
sequence, or calls with each other, across pieces. It costs one forward pass more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.forward import EdgeValues, edge_values
from fakevllm_server.backends.torch_forest.plan import Plan

LossOfEdges = Callable[[Sequence[EdgeValues]], Tensor]
"""The values of every piece, in the order of the plans -> a scalar."""


def backward_in_two_passes(
    model: Any,
    plans: Sequence[Plan],
    attention: str,
    loss_of: LossOfEdges,
    *,
    with_entropy: bool = False,
    max_logits: int | None = None,
) -> Tensor:
    """Adds the gradient of `loss_of` to the model's; returns the loss, without a graph."""
    with torch.no_grad():
        first = [
            edge_values(model, plan, attention, with_entropy=with_entropy, max_logits=max_logits)
            for plan in plans
        ]
    loss, coefficients = coefficients_of(loss_of, first)
    for plan, coefficient in zip(plans, coefficients, strict=True):
        second_pass(model, plan, attention, coefficient, max_logits=max_logits)
    return loss


def coefficients_of(
    loss_of: LossOfEdges, first: Sequence[EdgeValues]
) -> tuple[Tensor, list[EdgeValues]]:
    """The loss, and its derivative by every value of the first pass."""
    leaves = [
        EdgeValues(
            _leaf(values.log_prob), None if values.entropy is None else _leaf(values.entropy)
        )
        for values in first
    ]
    with torch.enable_grad():
        loss = loss_of(leaves)
    asked = [tensor for values in leaves for tensor in values if tensor is not None]
    found = iter(torch.autograd.grad(loss, asked, allow_unused=True, materialize_grads=True))
    coefficients = [
        EdgeValues(next(found), None if values.entropy is None else next(found))
        for values in leaves
    ]
    return loss.detach(), coefficients


def second_pass(
    model: Any,
    plan: Plan,
    attention: str,
    coefficient: EdgeValues,
    *,
    max_logits: int | None = None,
) -> None:
    """Adds this piece's share of the gradient to the model's."""
    if not plan.num_edges:
        return
    with_entropy = coefficient.entropy is not None  # drop it where the loss has none: it costs
    values = edge_values(model, plan, attention, with_entropy=with_entropy, max_logits=max_logits)
    surrogate = (coefficient.log_prob * values.log_prob).sum()
    if coefficient.entropy is not None and values.entropy is not None:
        surrogate = surrogate + (coefficient.entropy * values.entropy).sum()
    surrogate.backward()


def _leaf(values: Tensor) -> Tensor:
    return values.detach().requires_grad_()
