"""verl's policy loss with our KL: the loss function of the workers, and metrics of a batch."""

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

from fakevllm_server.backends.torch_losses.aggregate import token_mean
from fakevllm_server.backends.torch_losses.kl import kl_loss
from fakevllm_server.backends.verl.batch_split import token_weights, total_weight
from fakevllm_server.types.backend import BackendError, Call, LossSpec, StepMetrics

METRIC_NAMES = {
    "actor/pg_clipfrac": "clip_fraction",
    "actor/pg_clipfrac_lower": "clip_fraction_lower",
    "actor/ppo_kl": "ppo_kl",
}
"""verl's name of a metric -> our name. verl averages over tokens and ignores weights of calls."""
UNSUPPORTED_LOSSES = ("gspo", "sapo", "geo_mean")
SUPPORTED_SETTINGS = {
    *("name", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    *("kl_loss_coef", "kl_loss_type", "tau_pos", "tau_neg"),
}
"""Settings of a loss that may differ from the default. The tau settings affect only sapo, which is
refused."""


class VerlPolicyLoss:
    """verl's policy loss with the name and the settings of a spec."""

    def __init__(self, spec: LossSpec) -> None:
        """Raise BackendError if verl does not have this loss, or the trainer cannot support it."""
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
        """Return the loss function for a worker. verl stores totals of the batch in its config, so
        each worker needs a copy."""
        config, coef = _config(self.spec), self.spec.kl_loss_coef
        if coef == 0:
            return partial(ppo_loss, config=config)
        return partial(_policy_and_kl_loss, config, coef, self.spec.kl_loss_type)

    def kl(
        self, rows: Sequence[Call], log_probs: Sequence[Tensor], reference: Sequence[Tensor]
    ) -> float:
        """Return the KL to the reference, a mean over response tokens with the loss weights of
        their calls.

        `log_probs` and `reference` have one tensor for each row, [response tokens].
        """
        per_token = kl_loss(
            torch.cat(list(log_probs)), torch.cat(list(reference)), self.spec.kl_loss_type
        )
        return token_mean(per_token, token_weights(rows), total_weight(rows)).item()

    def metrics(
        self, rows: Sequence[Call], log_probs: Sequence[Tensor], *, is_first: bool
    ) -> StepMetrics:
        """Return the clip fractions and `ppo_kl` of the whole batch.

        The workers' own metrics are not used, because they are means over micro-batches.
        `log_probs` has one tensor for each row, [response tokens]. `is_first` is true before any
        update. `ppo_kl` is reported only then, because it is about the policy that sampled the
        calls.
        """
        sampled = pad_sequence([torch.tensor(list(row.logprobs)) for row in rows], True)
        lengths = torch.tensor([len(row.response_ids) * (row.weight > 0) for row in rows])
        mask = (torch.arange(sampled.shape[1])[None, :] < lengths[:, None]).float()
        advantages = pad_sequence([torch.tensor(list(row.advantages)) for row in rows], True)
        _, metrics = self._loss(
            old_log_prob=sampled,
            log_prob=pad_sequence(list(log_probs), True),
            advantages=advantages,
            response_mask=mask,
            config=_config(self.spec),
        )
        return {
            name: float(metrics[verl_name])
            for verl_name, name in METRIC_NAMES.items()
            if verl_name in metrics and (is_first or name != "ppo_kl")
        }


def _policy_and_kl_loss(
    config: FSDPActorConfig,
    coef: float,
    estimator: str,
    model_output: Any,
    data: Any,
    dp_group: Any = None,
) -> tuple[Tensor, Any]:
    """Return verl's loss plus our KL. verl's own KL (`use_kl_loss`) ignores the loss weights of the
    calls, whereas verl's policy loss applies them."""
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    padded = data.select("response_mask", "rollout_is_weights", "ref_log_prob").to_padded_tensor()
    log_probs = no_padding_2_padding(model_output["log_probs"], data)
    kl = kl_loss(log_probs, padded["ref_log_prob"], estimator)
    weighted = kl * padded["rollout_is_weights"] * padded["response_mask"]
    return loss + coef * weighted.sum() / data["batch_num_tokens"] * data["dp_size"], metrics


def _check_supported(spec: LossSpec) -> None:
    """Raise BackendError for settings that verl's rows cannot express. A row contains the loss
    weights of its tokens for a mean over tokens, and no information about other calls of its
    episode."""
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
