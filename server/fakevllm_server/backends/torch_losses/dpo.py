"""Direct preference optimization, from Rafailov et al., "Direct Preference Optimization" (2023).

    L = -(1 / P) Σ_pairs log σ(β (r_chosen - r_rejected)),   r = Σ_t (ℓ_t - ℓ_ref,t)

The mean is over the P pairs of the step. r is summed over the tokens of a response. β is
`preference_beta`. This is the loss of TRL's `DPOTrainer` with `loss_type = "sigmoid"`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_losses.demonstration_rows import (
    DemonstrationLoss,
    DemonstrationRows,
)


def dpo(
    log_prob: Tensor, reference: Tensor | None, rows: DemonstrationRows, spec: LossSpec
) -> DemonstrationLoss:
    """Return a micro-batch's part of the loss. `log_prob` and `reference` have the log-probability
    of each response under the policy and under the reference policy. The metric
    `preference_accuracy` is the share of pairs with r_chosen > r_rejected."""
    assert reference is not None, "dpo needs the reference policy"
    signed = rows.signs.to(log_prob.dtype) * (log_prob - reference)
    margin = log_prob.new_zeros(rows.num_pairs).index_add(0, rows.pairs, signed)
    loss = -logsigmoid(spec.preference_beta * margin).sum() / rows.step_pairs
    num_right = (margin.detach() > 0).to(log_prob.dtype).sum()
    return DemonstrationLoss(loss, {"preference_accuracy": num_right / rows.step_pairs})
