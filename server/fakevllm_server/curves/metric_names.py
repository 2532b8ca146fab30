"""Names for a step's metrics in the TensorBoard curves. If verl has the same metric, verl's name is
used. This module does no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fakevllm_server.run.client_metrics import PREFIX

VERL: Mapping[str, tuple[str, ...]] = {
    # sampled groups
    "reward_mean": ("critic/score/mean", "critic/rewards/mean"),
    "reward_max": ("critic/score/max", "critic/rewards/max"),
    "reward_min": ("critic/score/min", "critic/rewards/min"),
    "advantage_mean": ("critic/advantages/mean",),
    "advantage_max": ("critic/advantages/max",),
    "advantage_min": ("critic/advantages/min",),
    "response_length_mean": ("response_length/mean",),
    "response_length_max": ("response_length/max",),
    "response_length_min": ("response_length/min",),
    "response_length_clip_ratio": ("response_length/clip_ratio",),
    "prompt_length_mean": ("prompt_length/mean",),
    "prompt_length_max": ("prompt_length/max",),
    "prompt_length_min": ("prompt_length/min",),
    # update of the weights
    "loss": ("actor/loss", "actor/pg_loss"),
    "clip_fraction": ("actor/pg_clipfrac",),
    "clip_fraction_lower": ("actor/pg_clipfrac_lower",),
    "ppo_kl": ("actor/ppo_kl",),
    "kl": ("actor/kl_loss",),
    "entropy": ("actor/entropy",),
    "grad_norm": ("actor/grad_norm",),
    "lr": ("actor/lr",),
    # differences between trainer and rollout engine
    "approx_kl": ("rollout_corr/k3_kl",),
    "rollout_is_weight": ("rollout_corr/rollout_is_mean",),
    "rollout_rs_rejected": ("rollout_corr/rollout_rs_masked_fraction",),
    "prob_diff_max": ("training/rollout_probs_diff_max",),
    # times
    "seconds": ("timing_s/update_actor",),
    "step_seconds": ("timing_s/step", "perf/time_per_step"),
}
"""Metrics of fakevllm, each with verl's names for the same metric."""
OWN_PREFIX = "fakevllm/"
"""Prefix for the names of metrics that verl does not have."""
NOT_WITH = {"critic/rewards/": "reward_kl_penalty", "actor/pg_loss": "kl"}
"""Prefixes of verl's names that are sometimes left out. Each key is a prefix, and each value is a
metric of fakevllm. If a step has this metric, the step gets no values under names with the prefix,
because verl's values would differ. In verl, `critic/rewards/` is the reward minus the KL penalty,
while fakevllm's metric is the reward alone. In verl, `actor/pg_loss` excludes the KL loss, while
fakevllm's metric includes the KL loss."""


def curve_values(step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics under the names that they have in the TensorBoard curves.

    >>> curve_values(3, {"reward_mean": 0.5, "tie_rate": 0.0})  # doctest: +NORMALIZE_WHITESPACE
    {'training/global_step': 3.0, 'critic/score/mean': 0.5, 'critic/rewards/mean': 0.5,
     'fakevllm/tie_rate': 0.0}
    """
    values = {"training/global_step": float(step)}
    for name, value in metrics.items():
        values |= dict.fromkeys(_names(name, metrics), value)
    return values | _throughput(metrics)


def _names(name: str, metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield the names that one metric of fakevllm has in the curves. The names may depend on the
    other metrics of the step."""
    own_name = name if name.startswith(PREFIX) else OWN_PREFIX + name
    for curve_name in VERL.get(name, (own_name,)):
        if not any(
            curve_name.startswith(start) and other in metrics for start, other in NOT_WITH.items()
        ):
            yield curve_name


def _throughput(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a step's number of tokens and its tokens per second, under verl's names. Return {} if
    the step's metrics have no token counts.

    The prompts and answers of all trained calls are counted. If several calls share a prefix, the
    prefix is counted once for each of these calls, although the trainer may have computed the
    prefix only once.
    """
    if not {"tokens_computed", "tokens_saved"} <= metrics.keys():
        return {}
    total = metrics["tokens_computed"] + metrics["tokens_saved"]
    seconds = metrics.get("step_seconds", 0.0)
    rate = {"perf/throughput": total / seconds} if seconds > 0 else {}
    return {"perf/total_num_tokens": total} | rate
