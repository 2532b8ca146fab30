"""The loss that a trainer computes for one micro-batch. It is a part of the step's loss.

    L = Σ_t scale_t · kept_t · (weight_t · policy_t + kl_loss_coef · kl_t - entropy_coeff · H_t)
      + demonstration_loss_coef · D

For each token t, policy_t is the policy loss, kl_t is the KL estimate, and H_t is the entropy.
weight_t is the importance weight that corrects the difference between rollout engine and trainer.
kept_t is 0 if `rollout_rs` rejects the token, else 1. scale_t is the token's factor in the mean or
sum that `loss_agg_mode` selects. D is the loss of the demonstrations (`sft`, `dpo` or `kto`). If
the job trains demonstrations alone, the loss is D.

The function `call_shares` computes scale_t from the whole step. Therefore the losses and gradients
of the micro-batches add up to those of the step. A rejected token adds nothing to the loss, but
still counts in the denominators of means. The denominators are computed before any forward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_losses import DEMONSTRATION_LOSSES, LOSSES
from fakevllm_server.backends.torch_losses.demonstration_rows import DemonstrationRows
from fakevllm_server.backends.torch_losses.importance_correction import (
    importance_weights,
    is_kept,
    mean_weight,
)
from fakevllm_server.backends.torch_losses.kl import kl_loss
from fakevllm_server.backends.torch_losses.trained_tokens import TrainedTokens


class SplitUnit(ValueError):
    """Raised if a loss couples the tokens of a sequence or of the whole step, but gets only a part
    of the coupled tokens."""


class StepLoss(NamedTuple):
    loss: Tensor
    """Scalar: this micro-batch's part of the step's loss."""
    metrics: dict[str, Tensor]
    """Scalars without a gradient. Each is this micro-batch's part of a mean over the step's
    tokens."""


def step_loss(
    log_prob: Tensor, tokens: TrainedTokens, spec: LossSpec, entropy: Tensor | None = None
) -> StepLoss:
    """Return one micro-batch's part of the step's loss.

    `log_prob` and `entropy` have a value for each token (shape [tokens]), computed with the current
    weights and with a gradient. The entropy is required if `entropy_coeff` is not 0.

    Raises SplitUnit if the loss couples the tokens of a unit (one sequence in the loss) or of the
    step, but `tokens` contains only a part of the coupled tokens. Raises SplitUnit as well if a
    demonstration loss couples several demonstrations, but `tokens` contains only some of them.
    """
    parts: list[StepLoss] = []
    if spec.has_policy_loss:
        parts.append(_policy_term(log_prob, tokens, spec, entropy))
    if tokens.demonstrations is not None:
        parts.append(_demonstration_term(log_prob, tokens, tokens.demonstrations, spec))
    loss = torch.stack([part.loss for part in parts]).sum() if parts else log_prob.new_zeros(())
    return StepLoss(loss, {name: value for part in parts for name, value in part.metrics.items()})


def _demonstration_term(
    log_prob: Tensor, tokens: TrainedTokens, rows: DemonstrationRows, spec: LossSpec
) -> StepLoss:
    name = spec.of_demonstrations
    assert name is not None, "demonstrations need a demonstration loss"
    if not rows.is_whole:
        raise SplitUnit(f"loss {name} needs all demonstrations that it couples in one micro-batch")
    reference = tokens.reference_log_prob
    loss, metrics = DEMONSTRATION_LOSSES[name](
        rows.sums(log_prob), None if reference is None else rows.sums(reference), rows, spec
    )
    coef = spec.demonstration_loss_coef if spec.has_policy_loss else 1.0
    return StepLoss(coef * loss, {"demonstration_loss": loss.detach(), **metrics})


def _policy_term(
    log_prob: Tensor, tokens: TrainedTokens, spec: LossSpec, entropy: Tensor | None
) -> StepLoss:
    """Return the policy loss of the sampled calls, with its KL term and its entropy bonus."""
    _check_whole(tokens, spec)
    # Tokens that do not count may be infinite or NaN, and no arithmetic makes 0 of an infinity.
    counted = tokens.counted
    tokens, log_prob = tokens.only(counted), log_prob[counted]
    old = log_prob.detach() if tokens.old_log_prob is None else tokens.old_log_prob
    if spec.bypass_mode:
        old = tokens.sampled_log_prob
    policy = LOSSES[spec.name](log_prob, old, tokens.advantages, tokens.units, spec)
    log_ratio = (log_prob if spec.bypass_mode else old) - tokens.sampled_log_prob
    weights = importance_weights(log_ratio, tokens.units, spec)
    kept = is_kept(log_ratio, tokens.units, spec).to(log_prob.dtype)
    per_token = policy.per_token * weights
    if spec.couples_step:
        per_token = per_token / mean_weight(weights, tokens.units, tokens.token_share, spec)
    measured = {"clip_fraction": policy.clipped, "clip_fraction_lower": policy.clipped_lower}
    if spec.rollout_is is not None:
        measured["rollout_is_weight"] = weights
    if spec.rollout_rs is not None:
        measured["rollout_rs_rejected"] = 1 - kept
    if spec.kl_loss_coef != 0:
        assert tokens.reference_log_prob is not None, "kl_loss_coef needs the reference policy"
        measured["kl"] = kl_loss(log_prob, tokens.reference_log_prob, spec.kl_loss_type)
        per_token = per_token + spec.kl_loss_coef * measured["kl"]
    if spec.entropy_coeff != 0:
        assert entropy is not None, "entropy_coeff needs the entropy"
        per_token = per_token - spec.entropy_coeff * entropy[counted]
    return StepLoss((tokens.scale * kept * per_token).sum(), token_means(measured, tokens))


def _check_whole(tokens: TrainedTokens, spec: LossSpec) -> None:
    if spec.couples_tokens and not tokens.has_whole_units:
        raise SplitUnit(
            f"loss {spec.name} with loss_unit {spec.loss_unit} needs all calls of a "
            f"{spec.loss_unit} in one micro-batch"
        )
    if spec.couples_step and not tokens.has_whole_step:
        raise SplitUnit("rollout_is_batch_normalize needs all calls of a step in one micro-batch")


def token_means(per_token: dict[str, Tensor], tokens: TrainedTokens) -> dict[str, Tensor]:
    """Return what one micro-batch contributes to means over the tokens of the step, without a
    gradient. `per_token` maps the name of each mean to the values of its tokens, a tensor of shape
    [tokens]. Tokens with weight 0 in the loss do not count."""
    counted = tokens.counted
    return {
        name: (value.detach()[counted] * tokens.token_share[counted]).sum()
        for name, value in per_token.items()
    }
