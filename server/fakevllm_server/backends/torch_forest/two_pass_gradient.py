"""The gradient of a loss that couples tokens of different pieces, which do not fit into memory at
once.

The loss is a function of the edges' log-probabilities l_e alone, so its gradient is

    Σ_e c_e · ∇l_e     with  c_e = ∂loss/∂l_e

Pass 1 computes all l_e without a graph. The loss of these values gives every c_e
(`loss_coefficients`). Pass 2 goes backward through Σ c_e·l_e, piece by piece (`backward_piece`).
The result is exact for losses that couple the tokens of a sequence, or calls with each other,
across pieces. It costs one additional forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.edge_log_probs import EdgeValues, edge_values
from fakevllm_server.backends.torch_forest.forward_plan import Plan

LossOfEdges = Callable[[Sequence[EdgeValues]], Tensor]
"""The values of every piece, in the order of the pieces -> the loss, a scalar."""


def loss_coefficients(
    loss_of: LossOfEdges, first_pass: Sequence[EdgeValues]
) -> tuple[Tensor, list[EdgeValues]]:
    """Return the loss, without a graph, and its derivative with respect to each value of the first
    pass."""
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
    """Add this piece's share of the gradient to the gradients of the model's weights."""
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
