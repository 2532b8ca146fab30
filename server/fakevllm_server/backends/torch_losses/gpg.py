"""The plain policy gradient.

    L = -A log_prob

Sources: REINFORCE, Williams 1992; GPG, arXiv 2504.02546; equal to verl's `gpg`. The loss has no
ratio. For calls that older model weights sampled, set `rollout_is`; the truncated importance weight
is then π / π_engine.
"""

from __future__ import annotations

from torch import Tensor

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_losses.policy_loss import PolicyLoss, unclipped


def gpg(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, units: Tensor, spec: LossSpec
) -> PolicyLoss:
    """Return the loss per token. Each tensor is [tokens]."""
    return unclipped(-advantages * log_prob)
