"""The two-pass gradient of a loss that couples pieces, by the functions that the trainer calls.

The trainer's own loop over them is tested in backends/embedded/train/test_passes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_server.backends.torch_forest.tiny_models import (
    build_model,
    coupled_loss,
    gathered_gradient,
    llama,
)
from swarm_server.forest.call_sets import GOLDEN, call_sets
from torch import Tensor

from fakevllm_server.backends.torch_forest.edge_log_probs import EdgeValues, edge_values
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.backends.torch_forest.two_pass_gradient import (
    LossOfEdges,
    backward_piece,
    loss_coefficients,
)
from fakevllm_server.forest import CallTokens, Piece, build_forest, pack


@cache
def shared_model() -> Any:
    return build_model(llama)


def backward(
    model: Any,
    plans: Sequence[Plan],
    loss_of: LossOfEdges,
    *,
    with_entropy: bool = False,
    max_logits: int | None = None,
) -> Tensor:
    """Add the gradient of `loss_of` to the model's, piece by piece, and return the loss."""
    options: dict[str, Any] = {"with_entropy": with_entropy, "max_logits": max_logits}
    with torch.no_grad():
        first_pass = [edge_values(model, plan, "chains", **options) for plan in plans]
    loss, coefficients = loss_coefficients(loss_of, first_pass)
    for plan, coefficient in zip(plans, coefficients, strict=True):
        backward_piece(model, plan, "chains", coefficient, max_logits=max_logits)
    return loss


def loss_over(pieces: Sequence[Piece], num_calls: int, *, with_entropy: bool) -> LossOfEdges:
    """Return a loss of all calls in their own order, whichever piece they are in."""

    def loss_of(values: Sequence[EdgeValues]) -> Tensor:
        log_probs = [torch.zeros(0)] * num_calls
        bonus = torch.zeros((), dtype=torch.float64)
        for piece, piece_values in zip(pieces, values, strict=True):
            plan = Plan.of(piece.forest)
            for call, log_prob in zip(
                piece.calls, plan.per_call(piece_values.log_prob), strict=True
            ):
                log_probs[call] = log_prob
            if with_entropy and piece_values.entropy is not None:
                bonus = bonus + plan.flat(piece_values.entropy).sum()
        # The loss couples the tokens of a call, and calls with each other.
        total = sum(log_prob.sum() for log_prob in log_probs)
        return coupled_loss([log_prob.double() for log_prob in log_probs]) + (
            0.01 * total**2 - 0.1 * bonus
        )

    return loss_of


def gradients(
    calls: Sequence[CallTokens], budget: int, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient from pieces in two passes, and the gradient from one forest."""
    model = shared_model()
    whole = [Piece(list(range(len(calls))), build_forest(calls))]
    values = edge_values(model, Plan.of(whole[0].forest), "chains", with_entropy=with_entropy)
    direct = loss_over(whole, len(calls), with_entropy=with_entropy)([values])
    if direct.requires_grad:
        direct.backward()
    expected = gathered_gradient(model)
    pieces = pack(calls, budget)
    loss = backward(
        model,
        [Plan.of(piece.forest) for piece in pieces],
        loss_over(pieces, len(calls), with_entropy=with_entropy),
        with_entropy=with_entropy,
        max_logits=50,
    )
    torch.testing.assert_close(loss, direct.detach(), rtol=0, atol=1e-9)
    return gathered_gradient(model), expected


@pytest.mark.parametrize("with_entropy", [False, True])
@settings(max_examples=12)
@given(calls=call_sets(), budget=st.integers(1, 30))
def test_pieces_in_two_passes_have_the_gradient_of_one_forest(
    with_entropy: bool, calls: list[CallTokens], budget: int
) -> None:
    if not any(call.trained for call in calls):
        calls = [*calls, *GOLDEN]
    actual, expected = gradients(calls, budget, with_entropy=with_entropy)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def test_pieces_that_the_loss_does_not_use_get_no_gradient() -> None:
    model = shared_model()
    plans = [Plan.of(build_forest([call])) for call in GOLDEN[:2]]
    backward(model, plans, lambda values: values[0].log_prob.sum())
    actual = gathered_gradient(model)
    edge_values(model, plans[0], "chains").log_prob.sum().backward()
    torch.testing.assert_close(actual, gathered_gradient(model), rtol=0, atol=1e-12)
