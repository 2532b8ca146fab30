"""Losses as pure functions of log-probabilities: policy losses with verl's names, and losses of
demonstrations as in TRL.

    step_loss.py              the function that trainers call: one micro-batch's part of the loss
    measured_loss.py          the same, with the step's metrics
    trained_tokens.py         the trained tokens of some calls as flat tensors
    ppo_clip.py               PPO clip with dual clip
    gspo.py cispo.py sapo.py geo_mean.py gpg.py
    policy_loss.py            arithmetic that the losses share
    sft.py dpo.py kto.py      losses of demonstrations
    demonstration_rows.py     the demonstrations of a micro-batch as tensors
    kl.py                     KL divergence to a reference policy
    importance_correction.py  importance weights and rejection, against trainer-engine mismatch
    mismatch_metrics.py       metrics of the difference between trainer and engine
    aggregate.py              weighted mean over tokens

A policy loss takes tensors of shape [tokens] and returns the loss of each token. It never averages
over tokens, because `algorithms.loss_sequences` determines the weight of each token. To add a loss,
add a file, an entry in LOSSES, and an entry in `loss_spec.LOSS_DEFAULTS`.

A demonstration loss takes the log-probability of each demonstration, summed over the tokens of its
response, and returns a scalar. To add one, add a file, an entry in DEMONSTRATION_LOSSES, and an
entry in `loss_spec.DEMONSTRATION_LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fakevllm_server.backends.torch_losses.cispo import cispo
from fakevllm_server.backends.torch_losses.demonstration_rows import (
    DemonstrationLoss,
    DemonstrationRows,
)
from fakevllm_server.backends.torch_losses.dpo import dpo
from fakevllm_server.backends.torch_losses.geo_mean import geo_mean
from fakevllm_server.backends.torch_losses.gpg import gpg
from fakevllm_server.backends.torch_losses.gspo import gspo
from fakevllm_server.backends.torch_losses.kto import kto
from fakevllm_server.backends.torch_losses.policy_loss import PolicyLoss
from fakevllm_server.backends.torch_losses.ppo_clip import vanilla
from fakevllm_server.backends.torch_losses.sapo import sapo
from fakevllm_server.backends.torch_losses.sft import sft

PolicyLossFn = Callable[[Tensor, Tensor, Tensor, Tensor, Any], PolicyLoss]
"""Function of (log_prob, old_log_prob, advantages, units, spec) that returns a PolicyLoss. Each
tensor has shape [tokens]."""

LOSSES: dict[str, PolicyLossFn] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "geo_mean": geo_mean,
    "gpg": gpg,
}

DemonstrationLossFn = Callable[[Tensor, Tensor | None, DemonstrationRows, Any], DemonstrationLoss]
"""Function of (log_prob, reference_log_prob, rows, spec) that returns a DemonstrationLoss. Both
tensors have shape [rows]."""

DEMONSTRATION_LOSSES: dict[str, DemonstrationLossFn] = {"sft": sft, "dpo": dpo, "kto": kto}
