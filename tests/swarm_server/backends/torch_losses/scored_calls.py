"""Calls with made-up numbers, for tests of the losses. They have no model and no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fakevllm_adapters.job.loss_spec import LossSpec, loss_defaults
from fakevllm_server.algorithms.loss_sequences import CallShare, LossCall, call_shares
from fakevllm_server.backends.torch_losses.step_loss import StepLoss, step_loss
from fakevllm_server.backends.torch_losses.trained_tokens import TrainedTokens


@dataclass(frozen=True)
class ScoredCall:
    """One call's log-probabilities from the engine (`logprobs`), the trained policy (`new`), the
    trainer before the step (`old`) and the reference, with its advantage and unit."""

    logprobs: Sequence[float]
    new: Sequence[float]
    advantage: float | Sequence[float]
    unit: str
    weight: float = 1.0
    old: Sequence[float] | None = None
    reference: Sequence[float] | None = None
    entropy: Sequence[float] | None = None


GOLDEN = [
    ScoredCall([-1, -2], [-0.7, -2.3], 1.0, "a"),
    ScoredCall([-0.5, -1.5, -0.2], [-0.9, -1, -0.2], -0.5, "b"),
    ScoredCall([-1.2], [-0.05], -2.0, "c"),
]


def spec_of(name: str, **settings: Any) -> LossSpec:
    """Return a loss spec; missing settings are the loss's own defaults."""
    return LossSpec(**({"name": name, **loss_defaults(name)._asdict()} | settings))


def shares_of(calls: Sequence[ScoredCall], spec: LossSpec) -> list[CallShare]:
    counted = [LossCall(call.unit, call.weight, len(call.logprobs)) for call in calls]
    return call_shares(counted, spec)


def flat(rows: Sequence[Sequence[float] | None]) -> Tensor | None:
    """Join the rows, or return None if a call has none."""
    if any(row is None for row in rows):
        return None
    return torch.tensor([value for row in rows for value in row or ()], dtype=torch.float64)


def new_of(calls: Sequence[ScoredCall]) -> Tensor:
    new = flat([call.new for call in calls])
    assert new is not None
    return new.requires_grad_()


def part(
    calls: Sequence[ScoredCall], shares: Sequence[CallShare], spec: LossSpec, new: Tensor
) -> StepLoss:
    tokens = TrainedTokens.of(
        calls,
        shares,
        dtype=torch.float64,
        old_log_prob=flat([call.old for call in calls]),
        reference_log_prob=flat([call.reference for call in calls]),
    )
    return step_loss(new, tokens, spec, flat([call.entropy for call in calls]))


def whole(calls: Sequence[ScoredCall], spec: LossSpec) -> tuple[StepLoss, list[float]]:
    """Return the loss of a step in one piece, and the gradient of each token."""
    new = new_of(calls)
    result = part(calls, shares_of(calls, spec), spec, new)
    result.loss.backward()
    assert new.grad is not None
    return result, new.grad.tolist()
