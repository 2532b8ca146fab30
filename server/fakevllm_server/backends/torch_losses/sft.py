"""Supervised fine-tuning: imitate the demonstrations.

    L = -(1 / N) Σ_t ℓ_t

ℓ_t is the log-probability of a response token under the policy. The sum covers all N response
tokens of the step. This is the loss of TRL's `SFTTrainer` with `loss_type = "nll"` and
`completion_only_loss`. One step here corresponds to one batch of TRL.
"""

from __future__ import annotations

from torch import Tensor

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_losses.demonstration_rows import (
    DemonstrationLoss,
    DemonstrationRows,
)


def sft(
    log_prob: Tensor, reference: Tensor | None, rows: DemonstrationRows, spec: LossSpec
) -> DemonstrationLoss:
    """Return the part that one micro-batch contributes to the step's loss. `log_prob` has the
    log-probability of each row (demonstration) in the micro-batch."""
    return DemonstrationLoss(-log_prob.sum() / max(rows.step_tokens, 1), {})
