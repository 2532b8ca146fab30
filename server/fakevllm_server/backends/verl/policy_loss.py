"""verl's policy loss with this project's KL term. This file has the loss function for the workers,
and computes the loss metrics of a batch."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from fakevllm_adapters.job.loss_spec import DEMONSTRATION_LOSSES
from fakevllm_server.backends.torch_losses.aggregate import token_mean
from fakevllm_server.backends.torch_losses.kl import kl_loss
from fakevllm_server.backends.verl.batch_split import token_weights, total_weight
from fakevllm_server.types.backend import BackendError, Call, LossSpec, StepMetrics

METRIC_NAMES = {
    "actor/pg_clipfrac": "clip_fraction",
    "actor/pg_clipfrac_lower": "clip_fraction_lower",
}
"""Maps verl's name of a metric to this project's name of the metric."""
UNSUPPORTED_LOSSES = ("gspo", "sapo", "geo_mean", *DEMONSTRATION_LOSSES)
SUPPORTED_SETTINGS = {
    *("name", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    *("kl_loss_coef", "kl_loss_type", "tau_pos", "tau_neg"),
}
"""Settings of a loss that a job may change from their defaults. The tau settings need no check
here, because they affect only `sapo`, which this trainer refuses."""


class VerlPolicyLoss:
    """One of verl's policy losses. A LossSpec names the loss and contains its settings."""

    def __init__(self, spec: LossSpec) -> None:
        """Look up verl's policy loss for `spec`. Raises BackendError if verl does not have this
        loss, or if the verl trainer does not support the settings of `spec`."""
        _check_supported(spec)
        self.spec = spec
        try:
            self._loss: Callable[..., Any] = get_policy_loss_fn(spec.name)
        except ValueError as error:
            raise BackendError(
                f"verl has no loss {spec.name!r} ({error}): choose another, or use "
                "--trainer embedded"
            ) from None

    def worker_loss(self) -> Callable[..., object]:
        """Return a new loss function to send to the workers. verl stores totals of the batch in the
        function's config object. Therefore each function gets a config object of its own."""
        config, coef = _config(self.spec), self.spec.kl_loss_coef
        if coef == 0:
            return partial(ppo_loss, config=config)
        return partial(_policy_and_kl_loss, config, coef, self.spec.kl_loss_type)

    def kl(
        self, rows: Sequence[Call], log_probs: Sequence[Tensor], reference: Sequence[Tensor]
    ) -> float:
        """Return the KL divergence to the reference policy, as a mean over response tokens. The
        weight of a token is the loss weight of its call. `log_probs` and `reference` have one
        tensor [response tokens] for each row."""
        per_token = kl_loss(
            torch.cat(list(log_probs)), torch.cat(list(reference)), self.spec.kl_loss_type
        )
        return token_mean(per_token, token_weights(rows), total_weight(rows)).item()

    def clip_fractions(self, rows: Sequence[Call], log_probs: Sequence[Tensor]) -> StepMetrics:
        """Return the clip fractions of the whole batch, as means over response tokens. The weight
        of a token is the loss weight of its call. `log_probs` has one tensor [response tokens] for
        each row.

        The metrics of verl's workers cannot be used instead, because these metrics are unweighted
        means over micro-batches. For a loss that does not clip, the fractions are 0.
        """
        sampled = [torch.tensor(list(row.logprobs)) for row in rows]
        advantages = [torch.tensor(list(row.advantages)) for row in rows]
        weights = token_weights(rows).split([len(row.response_ids) for row in rows])
        # verl takes its means with this mask, so a mask of weights makes weighted means.
        _, metrics = self._loss(
            old_log_prob=pad_sequence(sampled, True),
            log_prob=pad_sequence(list(log_probs), True),
            advantages=pad_sequence(advantages, True),
            response_mask=pad_sequence(list(weights), True),
            config=_config(self.spec),
        )
        return {name: float(metrics.get(verl_name, 0)) for verl_name, name in METRIC_NAMES.items()}


def _policy_and_kl_loss(
    config: FSDPActorConfig,
    coef: float,
    estimator: str,
    model_output: Any,
    data: Any,
    dp_group: Any = None,
) -> tuple[Tensor, Any]:
    """Return verl's policy loss plus `coef` times this project's KL term. Also return verl's
    metrics. verl's own KL term (`use_kl_loss`) is not used, because it ignores the loss weights of
    the calls."""
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    padded = data.select("response_mask", "rollout_is_weights", "ref_log_prob").to_padded_tensor()
    log_probs = no_padding_2_padding(model_output["log_probs"], data)
    kl = kl_loss(log_probs, padded["ref_log_prob"], estimator)
    weighted = kl * padded["rollout_is_weights"] * padded["response_mask"]
    return loss + coef * weighted.sum() / data["batch_num_tokens"] * data["dp_size"], metrics


def _check_supported(spec: LossSpec) -> None:
    """Check that the verl trainer supports the settings of a loss. Raises BackendError for other
    settings.

    verl gets each call as a row of its own, and computes the loss as a weighted mean over tokens.
    Therefore no other aggregation is supported. Losses that couple the calls of an episode are not
    supported either, because a row has no information about other calls.
    """
    default = LossSpec()
    unsupported = [
        f"{field.name} = {str(getattr(spec, field.name)).lower()}"
        for field in fields(spec)
        if field.name not in SUPPORTED_SETTINGS
        and getattr(spec, field.name) != getattr(default, field.name)
    ]
    if spec.name in UNSUPPORTED_LOSSES:
        unsupported.insert(0, f"loss = {spec.name}")
    if unsupported:
        raise BackendError(
            "the verl trainer supports vanilla, cispo and gpg as a mean over tokens, with "
            "loss_unit episode, without entropy and correction. It does not support "
            f"{', '.join(unsupported)}: use --trainer embedded"
        )


def _config(spec: LossSpec) -> FSDPActorConfig:
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=spec.clip_ratio_low,
        clip_ratio_high=spec.clip_ratio_high,
        clip_ratio_c=spec.clip_ratio_c,
        policy_loss=PolicyLossConfig(loss_mode=spec.name),
        use_kl_loss=False,
        entropy_coeff=0.0,
    )
