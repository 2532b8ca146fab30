"""Summarise a training step in one line of the server's log.

The line shows a selection of the metrics. The run log contains all metrics of the step. The
functions do no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fakevllm_server.backends.training.step_updates import UPDATES_MADE

UNMEASURED = "-"
DROPPED = "dropped_"
"""Prefix of the metrics that count dropped groups. The reason follows the prefix."""


def formatted(metrics: Mapping[str, float], name: str, spec: str) -> str:
    """Format the metric `name` by a format spec. Return a dash if the step did not measure this
    metric.

    >>> metrics = {"x": 0.25, "y": math.nan}
    >>> formatted(metrics, "x", ".3f"), formatted(metrics, "z", ".3f"), formatted(metrics, "y", "g")
    ('0.250', '-', 'nan')
    """
    return format(metrics[name], spec) if name in metrics else UNMEASURED


def not_finite(metrics: Mapping[str, float]) -> str:
    """Return a text with the names and values of the metrics that are NaN or infinite.

    >>> not_finite({"loss": math.nan, "grad_norm": math.inf, "ess": 1.0})
    'loss nan, grad_norm inf'
    """
    parts = (f"{name} {value}" for name, value in metrics.items() if not math.isfinite(value))
    return ", ".join(parts)


def step_line(step: int, version: int, metrics: Mapping[str, float]) -> str:
    """Return the log line of a step whose weights are served as `version`.

    >>> step_line(3, 4, {"reward_mean": 0.5, "groups": 8, "tokens_trained": 96, "updates_made": 4})
    'step 3 → version 4: reward 0.500 of 8 groups, 96 tokens trained, 4 updates'
    """
    parts = [
        *_groups(metrics),
        *_feedback(metrics),
        *_dropped(metrics),
        *_coverage(metrics),
        *_updates(metrics),
        *_forest(metrics),
        *_mismatch(metrics),
        *_time(metrics),
    ]
    return f"step {step} → version {version}: " + ", ".join(parts)


def _groups(metrics: Mapping[str, float]) -> list[str]:
    num = metrics.get("groups", 0)
    if not num and (metrics.get("feedback_samples") or metrics.get("edits")):
        return []
    return [
        f"reward {formatted(metrics, 'reward_mean', '.3f')} of {num:.0f} groups",
        f"{metrics.get('tokens_trained', 0):.0f} tokens trained",
    ]


def _feedback(metrics: Mapping[str, float]) -> list[str]:
    num, tokens = metrics.get("feedback_samples", 0), metrics.get("feedback_tokens", 0)
    parts = [f"feedback on {num:.0f} answers, {tokens:.0f} tokens trained"] if num else []
    edits = metrics.get("edits", 0)
    return parts + ([f"{edits:.0f} edits of answers"] if edits else [])


def _dropped(metrics: Mapping[str, float]) -> list[str]:
    """Return the part of the log line that counts the groups dropped since the previous step, by
    reason."""
    counts = [
        f"{num:.0f} {name.removeprefix(DROPPED)}"
        for name, num in metrics.items()
        if name.startswith(DROPPED)
    ]
    return [f"dropped {' '.join(counts)}"] if counts else []


def _coverage(metrics: Mapping[str, float]) -> list[str]:
    untrainable = metrics.get("untrainable_tokens", 0)
    return [f"{untrainable:.0f} untrainable"] if untrainable else []


def _updates(metrics: Mapping[str, float]) -> list[str]:
    """Return the part of the log line with the number of updates, if there are several."""
    num = metrics.get(UPDATES_MADE, 0)
    return [f"{num:.0f} updates"] if num > 1 else []


def _forest(metrics: Mapping[str, float]) -> list[str]:
    """Return the part of the log line about shared prefixes. This part has the number of tokens
    that the trainer did not have to compute again, and the speed-up.

    The speed-up is measured only in some steps.
    """
    if "rho" not in metrics:
        return []
    saved = metrics.get("tokens_saved", 0)
    speedup = metrics.get("forest_speedup", 0)
    measured = f", {speedup:.2f} times as quick as rows" if speedup else ""
    return [f"rho {metrics['rho']:.2f} ({saved:.0f} tokens saved{measured})"]


def _mismatch(metrics: Mapping[str, float]) -> list[str]:
    """Return two parts of the log line: the difference between trainer and rollout engine, and a
    note if no update was made."""
    parts: list[str] = []
    if "token_fidelity" in metrics:
        parts.append(f"fidelity {metrics['token_fidelity']:.6g}")
    if {"token_fidelity", "mismatch_k3", "ess"} & metrics.keys():
        # If no token was sampled by the trained weights themselves, k3 includes their drift.
        age = " with age" if metrics.get("equal_version") == 0 else ""
        k3, ess = formatted(metrics, "mismatch_k3", ".2g"), formatted(metrics, "ess", ".3f")
        parts.append(f"mismatch k3 {k3}{age}, ess {ess}")
    if metrics.get("skipped"):
        parts.append("NO UPDATE" if metrics.get("no_update") else "NOT ALL UPDATES")
    non_finite = not_finite(metrics)
    return [*parts, non_finite] if non_finite else parts


def _time(metrics: Mapping[str, float]) -> list[str]:
    return [f"{metrics['seconds']:.1f} s"] if "seconds" in metrics else []
