"""verl's own policy loss, and our KL: what the workers train on, and what is told of a batch."""

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
from fakevllm_server.backends.verl.shares import token_weights, total_weight
from fakevllm_server.types.backend import BackendError, Call, LossSpec, StepMetrics

SHOWN = {
    "actor/pg_clipfrac": "clip_fraction",
    "actor/pg_clipfrac_lower": "clip_fraction_lower",
    "actor/ppo_kl": "ppo_kl",
}
"""verl's name -> ours. Its means are over tokens and do not weigh calls."""
UNCARRIED = ("gspo", "sapo", "geo_mean")
OF_OTHERS = ("kl_loss_coef", "kl_loss_type", "tau_pos", "tau_neg")
"""The KL is the worker's own; the others do nothing without it, or without sapo."""


class Policy:
    """The loss of a spec's name. Raises BackendError for a name that verl does not know."""

    def __init__(self, spec: LossSpec) -> None:
        _refuse(spec)
        self.spec = spec
        try:
            self._loss: Callable[..., Any] = get_policy_loss_fn(spec.name)
        except ValueError as error:
            raise BackendError(
                f"verl knows no loss {spec.name!r} ({error}): choose another, or take "
                "--trainer embedded"
            ) from None

    def worker_loss(self) -> Callable[..., object]:
        """For a worker, which keeps the batch's totals in it."""
        config, coef = _config(self.spec), self.spec.kl_loss_coef
        if coef == 0:
            return partial(ppo_loss, config=config)
        return partial(_ppo_and_kl_loss, config, coef, self.spec.kl_loss_type)

    def kl(
        self, rows: Sequence[Call], log_probs: Sequence[Tensor], reference: Sequence[Tensor]
    ) -> float:
        """From the reference, a mean over response tokens by their calls' weights."""
        per_token = kl_loss(
            torch.cat(list(log_probs)), torch.cat(list(reference)), self.spec.kl_loss_type
        )
        return token_mean(per_token, token_weights(rows), total_weight(rows)).item()

    def metrics(
        self, rows: Sequence[Call], log_probs: Sequence[Tensor], *, is_first: bool
    ) -> StepMetrics:
        """Of the whole batch: a worker's own numbers are means over its micro-batches. `is_first`:
        before any update, when `ppo_kl` is of the policy that sampled."""
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
            ours: float(metrics[theirs])
            for theirs, ours in SHOWN.items()
            if theirs in metrics and (is_first or ours != "ppo_kl")
        }


def _ppo_and_kl_loss(
    config: FSDPActorConfig,
    coef: float,
    estimator: str,
    model_output: Any,
    data: Any,
    dp_group: Any = None,
) -> tuple[Tensor, Any]:
    """verl's own KL (`use_kl_loss`) leaves out the weights of calls, which its policy loss has."""
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    told = data.select("response_mask", "rollout_is_weights", "ref_log_prob").to_padded_tensor()
    log_probs = no_padding_2_padding(model_output["log_probs"], data)
    kl = kl_loss(log_probs, told["ref_log_prob"], estimator)
    weighed = kl * told["rollout_is_weights"] * told["response_mask"]
    return loss + coef * weighed.sum() / data["batch_num_tokens"] * data["dp_size"], metrics


def _refuse(spec: LossSpec) -> None:
    """Rows carry weights of a mean over tokens, and nothing about other calls of their episode."""
    carried = {"name", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", *OF_OTHERS}
    plain = LossSpec()
    asked = [
        f"{field.name} = {str(getattr(spec, field.name)).lower()}"
        for field in fields(spec)
        if field.name not in carried and getattr(spec, field.name) != getattr(plain, field.name)
    ]
    if spec.name in UNCARRIED:
        asked.insert(0, f"loss = {spec.name}")
    if asked:
        raise BackendError(
            "the verl trainer trains vanilla, cispo and gpg as a mean over tokens, with loss_unit "
            "episode, no entropy and no correction; it was asked for "
            f"{', '.join(asked)}: take --trainer embedded"
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
