"""A micro-batch's part of a step's loss: the one function a trainer calls.

    L = Σ_t scale_t · kept_t · (weight_t · policy_t + kl_loss_coef · kl_t - entropy_coeff · H_t)

`scale` comes from the whole step (`call_shares`), so the parts and their gradients sum to the
step's. A rejected token (`rollout_rs`) has no part in any term; it stays in the denominators, for
they are known before any forward pass.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_losses import LOSSES
from fakevllm_server.backends.torch_losses.correction import (
    importance_weights,
    is_kept,
    mean_weight,
)
from fakevllm_server.backends.torch_losses.kl import kl_loss
from fakevllm_server.backends.torch_losses.tokens import TrainedTokens


class SplitUnit(ValueError):
    """A sequence-level loss was given part of a sequence."""


class StepLoss(NamedTuple):
    loss: Tensor
    """A scalar, this micro-batch's part of the step's loss."""
    shown: dict[str, Tensor]
    """Scalars, parts of means over the step's tokens; no gradient."""


def step_loss(
    log_prob: Tensor, tokens: TrainedTokens, spec: LossSpec, entropy: Tensor | None = None
) -> StepLoss:
    """`log_prob` and `entropy` [tokens], of the weights that are trained, with their gradient; the
    entropy is needed where `entropy_coeff` is not 0.

    Raises SplitUnit where the loss couples the tokens of a unit, or of the step, that is not whole
    here.
    """
    _check_whole(tokens, spec)
    # What does not count may be anything, and no arithmetic makes 0 of an infinity.
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
    shown = {"clip_fraction": policy.clipped, "clip_fraction_lower": policy.clipped_lower}
    if spec.rollout_is is not None:
        shown["rollout_is_weight"] = weights
    if spec.rollout_rs is not None:
        shown["rollout_rs_rejected"] = 1 - kept
    if tokens.reference_log_prob is not None:
        shown["kl"] = kl_loss(log_prob, tokens.reference_log_prob, spec.kl_loss_type)
        per_token = per_token + spec.kl_loss_coef * shown["kl"]
    if spec.entropy_coeff != 0:
        assert entropy is not None, "entropy_coeff needs the entropy"
        per_token = per_token - spec.entropy_coeff * entropy[counted]
    return StepLoss((tokens.scale * kept * per_token).sum(), token_means(shown, tokens))


def _check_whole(tokens: TrainedTokens, spec: LossSpec) -> None:
    if spec.couples_tokens and not tokens.has_whole_units:
        raise SplitUnit(
            f"loss {spec.name} with loss_unit {spec.loss_unit} needs all calls of a "
            f"{spec.loss_unit} in one micro-batch"
        )
    if spec.couples_step and not tokens.has_whole_step:
        raise SplitUnit("rollout_is_batch_normalize needs all calls of a step in one micro-batch")


def token_means(per_token: dict[str, Tensor], tokens: TrainedTokens) -> dict[str, Tensor]:
    """This micro-batch's parts of means over the step's tokens, of those that count. A name with
    [tokens] each; no gradient."""
    counted = tokens.counted
    return {
        name: (value.detach()[counted] * tokens.token_share[counted]).sum()
        for name, value in per_token.items()
    }
