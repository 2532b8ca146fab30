"""The gauges for `/metrics` about the guard, which notices when training goes wrong, and about the
alerts that it sends."""

from __future__ import annotations

from fakevllm.guard.alert_webhook import AlertWebhook
from fakevllm.guard.guard_service import Guard
from fakevllm.metrics import Metrics


def add_guard_gauges(metrics: Metrics, guard: Guard, webhook: AlertWebhook | None) -> None:
    """Add the gauges of the guard to the metrics. `webhook` is None if no alerts are sent."""
    metrics.labelled_gauge(
        "fakevllm_guard_alarms",
        "1 while the alarm of a detector of the guard has not ended, and 0 for the other "
        "detectors that run.",
        "detector",
        lambda: guard.detectors_on,
    )
    metrics.labelled_gauge(
        "fakevllm_alerts",
        "Alarms that were sent to the webhook, could not be sent, or were dropped because too many "
        "waited.",
        "outcome",
        lambda: {} if webhook is None else webhook.counts,
    )
