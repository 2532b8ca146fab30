"""A step in one line of the server's log. All it measured is in the run's log. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

UNMEASURED = "-"
DROPPED = "dropped_"
"""How the metric begins that counts groups dropped for a reason."""


def shown(metrics: Mapping[str, float], name: str, how: str) -> str:
    """As `how` formats it, or a dash where it was not measured.

    >>> shown({"x": 0.25}, "x", ".3f"), shown({}, "x", ".3f"), shown({"x": math.nan}, "x", "g")
    ('0.250', '-', 'nan')
    """
    return format(metrics[name], how) if name in metrics else UNMEASURED


def not_finite(metrics: Mapping[str, float]) -> str:
    """Which numbers are none, with what they are.

    >>> not_finite({"loss": math.nan, "grad_norm": math.inf, "ess": 1.0})
    'loss nan, grad_norm inf'
    """
    odd = (f"{name} {value}" for name, value in metrics.items() if not math.isfinite(value))
    return ", ".join(odd)


def step_line(step: int, version: int, metrics: Mapping[str, float]) -> str:
    """
    >>> step_line(3, 4, {"reward_mean": 0.5, "groups": 8, "tokens_trained": 96, "seconds": 0.25})
    'step 3 → version 4: reward 0.500 of 8 groups, 96 tokens trained, 0.2 s'
    """
    parts = [
        *_groups(metrics),
        *_feedback(metrics),
        *_dropped(metrics),
        *_coverage(metrics),
        *_forest(metrics),
        *_truth(metrics),
        *_time(metrics),
    ]
    return f"step {step} → version {version}: " + ", ".join(parts)


def _groups(metrics: Mapping[str, float]) -> list[str]:
    num = metrics.get("groups", 0)
    if not num and metrics.get("feedback_samples"):
        return []
    return [
        f"reward {shown(metrics, 'reward_mean', '.3f')} of {num:.0f} groups",
        f"{metrics.get('tokens_trained', 0):.0f} tokens trained",
    ]


def _feedback(metrics: Mapping[str, float]) -> list[str]:
    num, tokens = metrics.get("feedback_samples", 0), metrics.get("feedback_tokens", 0)
    told = f"feedback on {num:.0f} answers, {tokens:.0f} tokens trained"
    return [told] if num else []


def _dropped(metrics: Mapping[str, float]) -> list[str]:
    """Groups, since the step before."""
    told = [
        f"{num:.0f} {name.removeprefix(DROPPED)}"
        for name, num in metrics.items()
        if name.startswith(DROPPED)
    ]
    return [f"dropped {' '.join(told)}"] if told else []


def _coverage(metrics: Mapping[str, float]) -> list[str]:
    untrainable = metrics.get("untrainable_tokens", 0)
    return [f"{untrainable:.0f} untrainable"] if untrainable else []


def _forest(metrics: Mapping[str, float]) -> list[str]:
    """Tokens are counted, the speed-up is measured now and then."""
    if "rho" not in metrics:
        return []
    saved = metrics.get("tokens_saved", 0)
    speedup = metrics.get("forest_speedup", 0)
    measured = f", {speedup:.2f} times as quick as rows" if speedup else ""
    return [f"rho {metrics['rho']:.2f} ({saved:.0f} tokens saved{measured})"]


def _truth(metrics: Mapping[str, float]) -> list[str]:
    told: list[str] = []
    if "token_fidelity" in metrics:
        told.append(f"fidelity {metrics['token_fidelity']:.6g}")
    if {"token_fidelity", "mismatch_k3", "ess"} & metrics.keys():
        # Without a token of the trained weights themselves, older ones' drift is in it.
        age = " with age" if metrics.get("equal_version") == 0 else ""
        k3, ess = shown(metrics, "mismatch_k3", ".2g"), shown(metrics, "ess", ".3f")
        told.append(f"mismatch k3 {k3}{age}, ess {ess}")
    if metrics.get("skipped"):
        told.append("NO UPDATE" if metrics.get("no_update") else "NOT ALL UPDATES")
    odd = not_finite(metrics)
    return [*told, odd] if odd else told


def _time(metrics: Mapping[str, float]) -> list[str]:
    return [f"{metrics['seconds']:.1f} s"] if "seconds" in metrics else []
