"""Kahneman-Tversky optimization, from Ethayarajh et al., "KTO" (2024), equation 7.

    desirable response     λ_D (1 - σ(β (r - z)))
    undesirable response   λ_U (1 - σ(β (z - r)))
    r = Σ_t (ℓ_t - ℓ_ref,t),   z = max(0, mean of r over mismatched pairs)

The loss is the mean over the responses of the step. z estimates the KL divergence between policy
and reference policy, and has no gradient. A mismatched pair is a prompt with a response of another
group of the step. If there is no such pair, z is 0. β is `preference_beta`, and λ_D and λ_U are
`desirable_weight` and `undesirable_weight`. TRL's `KTOTrainer` with `loss_type = "kto"` has the
same loss. One step here corresponds to one batch of TRL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_losses.demonstration_rows import (
    DemonstrationLoss,
    DemonstrationRows,
)


def kto(
    log_prob: Tensor, reference: Tensor | None, rows: DemonstrationRows, spec: LossSpec
) -> DemonstrationLoss:
    """Return what `rows` contribute to the step's loss, and the metric `kto_kl`. This metric is z,
    the estimated KL divergence between the policy and the reference policy. A row is a prompt with
    a response. `log_prob` and `reference` have the log-probability of each row's response under the
    policy and under the reference policy."""
    assert reference is not None, "kto needs the reference policy"
    log_ratio = log_prob - reference
    z = log_ratio.detach().new_zeros(())
    if (mismatched := rows.signs == 0).any():
        z = log_ratio.detach()[mismatched].mean().clamp(min=0)
    signs, log_ratio = rows.signs[~mismatched].to(log_prob.dtype), log_ratio[~mismatched]
    values = 1 - torch.sigmoid(spec.preference_beta * signs * (log_ratio - z))
    desirable, undesirable = map(z.new_tensor, (spec.desirable_weight, spec.undesirable_weight))
    weights = torch.where(signs > 0, desirable, undesirable)
    return DemonstrationLoss((weights * values).sum() / rows.step_rows, {"kto_kl": z})
