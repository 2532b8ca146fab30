"""What a step's metrics are called on a chart: by verl's names where they mean the same. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fakevllm_server.run.client_metrics import PREFIX

VERL: Mapping[str, tuple[str, ...]] = {
    # of what was sampled
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
    # of the update
    "loss": ("actor/loss", "actor/pg_loss"),
    "clip_fraction": ("actor/pg_clipfrac",),
    "clip_fraction_lower": ("actor/pg_clipfrac_lower",),
    "ppo_kl": ("actor/ppo_kl",),
    "kl": ("actor/kl_loss",),
    "entropy": ("actor/entropy",),
    "grad_norm": ("actor/grad_norm",),
    "lr": ("actor/lr",),
    # of how trainer and engine differ
    "approx_kl": ("rollout_corr/k3_kl",),
    "rollout_is_weight": ("rollout_corr/rollout_is_mean",),
    "rollout_rs_rejected": ("rollout_corr/rollout_rs_masked_fraction",),
    "prob_diff_max": ("training/rollout_probs_diff_max",),
    # of time
    "seconds": ("timing_s/update_actor",),
    "step_seconds": ("timing_s/step", "perf/time_per_step"),
}
"""Our metric -> verl's."""
OWN = "fakevllm/"
NOT_WITH = {"critic/rewards/": "reward_kl_penalty", "actor/pg_loss": "kl"}
"""The beginning of a name of verl's -> the metric beside which ours is something else: a reward
before the KL was taken from it, a loss that has the KL in it."""


def charted(step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """
    >>> charted(3, {"reward_mean": 0.5, "tie_rate": 0.0})  # doctest: +NORMALIZE_WHITESPACE
    {'training/global_step': 3.0, 'critic/score/mean': 0.5, 'critic/rewards/mean': 0.5,
     'fakevllm/tie_rate': 0.0}
    """
    told = {"training/global_step": float(step)}
    for name, value in metrics.items():
        told |= dict.fromkeys(_names(name, metrics), value)
    return told | _throughput(metrics)


def _names(name: str, metrics: Mapping[str, float]) -> Iterator[str]:
    own = name if name.startswith(PREFIX) else OWN + name
    for theirs in VERL.get(name, (own,)):
        if not any(
            theirs.startswith(start) and other in metrics for start, other in NOT_WITH.items()
        ):
            yield theirs


def _throughput(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of prompts and answers of all calls that were trained, whether or not they shared work."""
    if not {"tokens_computed", "tokens_saved"} <= metrics.keys():
        return {}
    total = metrics["tokens_computed"] + metrics["tokens_saved"]
    seconds = metrics.get("step_seconds", 0.0)
    rate = {"perf/throughput": total / seconds} if seconds > 0 else {}
    return {"perf/total_num_tokens": total} | rate
