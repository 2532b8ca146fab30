"""Policy losses by verl's names, as pure functions of log-probabilities.

    vanilla.py    PPO clip with dual clip
    kl.py         distance to a reference policy
    aggregate.py  from a loss per token to one number

A new loss is a new file and one entry in LOSSES. All take [rows, tokens] tensors and read
`LossSpec` for settings.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fakevllm_server.backends.base import LossSpec
from fakevllm_server.backends.torch_losses.vanilla import PolicyLoss, vanilla

PolicyLossFn = Callable[[Tensor, Tensor, Tensor, Tensor, LossSpec], PolicyLoss]
"""(log_prob, old_log_prob, advantages, mask, spec), each tensor [rows, tokens]."""

LOSSES: dict[str, PolicyLossFn] = {
    "vanilla": vanilla,
}
