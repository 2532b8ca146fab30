"""The gradient of a loss that couples tokens of different pieces (sets of calls that go through the
model together). The pieces of a training step do not all fit into memory at the same time.

An edge e is a predicted token, and l_e is its log-probability. A loss without entropies depends on
the weights only through all l_e. A loss with entropies also uses the entropies of the edges.
Without entropies, the gradient of the loss is

    Σ_e c_e · ∇l_e     with  c_e = ∂loss/∂l_e

The first pass computes all l_e without a gradient graph. Then `loss_coefficients` computes every
c_e from all l_e. The second pass computes l_e again, one piece after another. For each piece,
`backward_piece` runs the backward pass of Σ c_e · l_e. The gradient is exact, no matter which
tokens the loss couples. The method costs one additional forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.edge_log_probs import EdgeValues, edge_values
from fakevllm_server.backends.torch_forest.forward_plan import Plan

LossOfEdges = Callable[[Sequence[EdgeValues]], Tensor]
"""Function that takes the edge values of all pieces, in the order of the pieces, and returns the
loss as a scalar. Edge values are log-probabilities and entropies of predicted tokens."""


def loss_coefficients(
    loss_of: LossOfEdges, first_pass: Sequence[EdgeValues]
) -> tuple[Tensor, list[EdgeValues]]:
    """Return (loss, coefficients). `first_pass` has the edge values of all pieces (sets of calls
    that go through the model together). Edge values are the log-probabilities of the predicted
    tokens, and their entropies if the loss needs them. The coefficients are the derivatives of the
    loss with respect to the edge values. The returned loss has no gradient graph."""
    leaves = [
        EdgeValues(
            _leaf(values.log_prob), None if values.entropy is None else _leaf(values.entropy)
        )
        for values in first_pass
    ]
    with torch.enable_grad():
        loss = loss_of(leaves)
    inputs = [tensor for values in leaves for tensor in values if tensor is not None]
    gradients = iter(torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True))
    coefficients = [
        EdgeValues(next(gradients), None if values.entropy is None else next(gradients))
        for values in leaves
    ]
    return loss.detach(), coefficients


def backward_piece(
    model: Any,
    plan: Plan,
    attention: str,
    coefficient: EdgeValues,
    *,
    max_logits: int | None = None,
) -> None:
    """Compute the gradient of one piece (a set of calls that go through the model together), and
    add it to the gradients of the model's weights. `coefficient` has the derivatives of the loss
    with respect to the log-probabilities and entropies of the piece's predicted tokens."""
    if not plan.num_edges:
        return
    # The entropy is costly: leave its coefficient out if the loss does not use it.
    with_entropy = coefficient.entropy is not None
    values = edge_values(model, plan, attention, with_entropy=with_entropy, max_logits=max_logits)
    surrogate = (coefficient.log_prob * values.log_prob).sum()
    if coefficient.entropy is not None and values.entropy is not None:
        surrogate = surrogate + (coefficient.entropy * values.entropy).sum()
    surrogate.backward()


def _leaf(values: Tensor) -> Tensor:
    return values.detach().requires_grad_()
