"""Golden numbers made by verl 0.9.1's own functions in float64 (docs: algorithms, 3.4)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fakevllm_server.backends.base import LossSpec
from fakevllm_server.backends.torch_losses import LOSSES
from fakevllm_server.backends.torch_losses.aggregate import token_mean
from fakevllm_server.backends.torch_losses.kl import k3

OLD = [[-1, -2], [-0.5, -1.5, -0.2], [-1.2]]
NEW = [[-0.7, -2.3], [-0.9, -1, -0.2], [-0.05]]
ADVANTAGES = torch.tensor([[1.0], [-0.5], [-2.0]], dtype=torch.float64)


def padded(rows: list[list[float]], fill: float) -> Tensor:
    return torch.tensor([row + [fill] * (3 - len(row)) for row in rows], dtype=torch.float64)


MASK = padded([[1.0] * len(row) for row in OLD], 0.0)


def spec(low: float = 0.2, high: float = 0.2) -> LossSpec:
    return LossSpec("vanilla", low, high, 3.0, 0.0)


@pytest.mark.parametrize(("high", "expected"), [(0.2, 0.963924), (0.28, 0.950590)])
def test_vanilla_gives_verls_loss(high: float, expected: float) -> None:
    policy = LOSSES["vanilla"](
        padded(NEW, -9.0), padded(OLD, -1.0), ADVANTAGES, MASK, spec(0.2, high)
    )

    assert token_mean(policy.per_token, MASK).item() == pytest.approx(expected, abs=1e-5)


def test_vanilla_gives_verls_gradient_and_none_where_it_clips() -> None:
    log_prob = padded(NEW, -9.0).requires_grad_()

    policy = LOSSES["vanilla"](log_prob, padded(OLD, -1.0), ADVANTAGES, MASK, spec())
    token_mean(policy.per_token, MASK).backward()

    assert log_prob.grad is not None
    found = log_prob.grad[MASK.bool()]
    expected = torch.tensor([0, -0.123470, 0, 0.137393, 0.083333, 0], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert not log_prob.grad[~MASK.bool()].any()


def test_vanilla_counts_clipped_tokens_as_verl_does() -> None:
    policy = LOSSES["vanilla"](padded(NEW, -9.0), padded(OLD, -1.0), ADVANTAGES, MASK, spec())

    assert token_mean(policy.clipped, MASK).item() == pytest.approx(0.3333, abs=1e-4)
    assert token_mean(policy.clipped_lower, MASK).item() == pytest.approx(0.1667, abs=1e-4)


def test_an_impossible_stale_token_keeps_the_loss_finite() -> None:
    far = torch.tensor([[0.0]], dtype=torch.float64)

    policy = LOSSES["vanilla"](far, far - 1e4, far - 1.0, far + 1.0, spec())

    assert policy.per_token.item() == pytest.approx(3.0)


def test_k3_and_its_gradient_are_verls() -> None:
    log_prob = torch.tensor([-1, -0.5, -2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.2, -0.9, -1.5], dtype=torch.float64)

    kl = k3(log_prob, reference)
    kl.sum().backward()

    assert kl.tolist() == pytest.approx([0.018731, 0.070320, 0.148721], abs=1e-5)
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([0.181269, 0.329680, -0.648721], abs=1e-5)


def test_shares_of_the_token_mean_add_up_to_the_whole() -> None:
    values = torch.arange(12, dtype=torch.float64).view(4, 3)
    weights = torch.tensor([[1, 1, 0], [0.5, 0.5, 0.5], [1, 0, 0], [1, 1, 1]], dtype=torch.float64)
    total = weights.sum()

    shares = [token_mean(values[i : i + 1], weights[i : i + 1], total) for i in range(4)]

    assert sum(share.item() for share in shares) == pytest.approx(
        token_mean(values, weights).item()
    )


def test_what_lies_outside_the_mask_cannot_spoil_the_mean() -> None:
    values = torch.tensor([[1.0, float("inf")], [float("nan"), 3.0]])

    assert token_mean(values, torch.tensor([[1.0, 0.0], [0.0, 1.0]])).item() == 2.0
