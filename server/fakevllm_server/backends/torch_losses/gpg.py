"""The policy loss of the plain policy gradient.

    L = -A log_prob

L is the loss of a token, and A is its advantage. The loss has no importance ratio. If some calls
may have been sampled with older weights, set `rollout_is`. The loss is then multiplied by a
truncated importance weight π / π_engine. π is the token's probability in the trainer, and π_engine
is its probability in the rollout engine. Sources: REINFORCE, Williams 1992; GPG, arXiv 2504.02546.
The loss is equal to verl's `gpg`.
"""

from __future__ import annotations

from torch import Tensor

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_losses.policy_loss import PolicyLoss, unclipped


def gpg(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, units: Tensor, spec: LossSpec
) -> PolicyLoss:
    """Return the policy-gradient loss of each token. Each tensor has shape [tokens]. `old_log_prob`
    and `units` are unused."""
    return unclipped(-advantages * log_prob)
