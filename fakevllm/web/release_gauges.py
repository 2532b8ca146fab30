"""The gauges for `/metrics` about the release gate. The gate decides whether a new version of the
weights may answer apps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fakevllm.gate.release_gate import GateView
from fakevllm.metrics import Metrics


def add_release_gauges(metrics: Metrics, view: Callable[[], GateView]) -> None:
    """Add the gauges of the release gate to the metrics. The gate decides whether a new version of
    the weights may answer apps. `view` returns the gate's state."""
    metrics.labelled_gauge(
        "fakevllm_release_version",
        "Versions of the weights by their role: released, and candidate while one is evaluated.",
        "role",
        lambda: _versions(view()),
    )
    metrics.labelled_gauge(
        "fakevllm_release_decisions",
        "Decisions about versions in the history of the server's run, by their kind: candidate, "
        "released, rejected, undecided, hold and resume.",
        "decision",
        lambda: view().num_decisions,
    )
    metrics.gauge(
        "fakevllm_release_held",
        "1 while no version is released, until `fakevllm release resume`.",
        lambda: view().is_held,
    )
    metrics.gauge(
        "fakevllm_release_blocked",
        "1 while nothing is decided for a reason that `fakevllm status` names, except while a "
        "training step runs or a released version is loaded.",
        lambda: view().is_blocked,
    )
    metrics.gauge(
        "fakevllm_evaluation_pairs",
        "Pairs of held-out rows in the candidate's evaluation; 0 without a candidate.",
        lambda: view().num_pairs,
    )
    metrics.labelled_gauge(
        "fakevllm_evaluation_difference",
        "Mean reward of the candidate minus that of the released version (bound mean), and the "
        "ends of its interval (low and high). Absent before the first pair.",
        "bound",
        lambda: _bounds(view().evaluation),
    )


def _versions(view: GateView) -> Mapping[str, float]:
    versions = {"released": view.released, "candidate": view.candidate}
    return {role: version for role, version in versions.items() if version is not None}


def _bounds(evaluation: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the difference between the mean rewards of the candidate and of the released version,
    and both ends of its confidence interval. A number that is not known yet is left out."""
    names = {"low": "low", "mean": "difference", "high": "high"}
    bounds = {bound: evaluation.get(name) for bound, name in names.items()}
    return {bound: value for bound, value in bounds.items() if value is not None}
