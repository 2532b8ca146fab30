"""The gauges for `/metrics` about the proxy's own load and its ledger."""

from __future__ import annotations

from fakevllm.admission.kill_switch import KillSwitch
from fakevllm.groups.request_pipeline import Pipeline
from fakevllm.ledger.store import Ledger
from fakevllm.metrics import Metrics
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.tracing.tracing import Tracing
from fakevllm.transport.call_slots import CallSlots
from fakevllm.transport.sibling_limit import SiblingLimit


def add_request_gauges(
    metrics: Metrics, pipeline: Pipeline, pause: KillSwitch, tracing: Tracing | None
) -> None:
    """Add the gauges of the requests of apps."""
    metrics.gauge("fakevllm_requests_open", "Requests being answered.", lambda: pipeline.num_open)
    metrics.gauge("fakevllm_paused", "1 while no request becomes a group.", lambda: pause.is_on)
    metrics.labelled_gauge(
        "fakevllm_traced_requests",
        "Requests whose OpenTelemetry spans were sent, could not be sent, or were dropped "
        "because the collector is too slow.",
        "outcome",
        lambda: {} if tracing is None else tracing.counts,
    )


def add_call_gauges(metrics: Metrics, sibling_limit: SiblingLimit, slots: CallSlots) -> None:
    """Add the gauges of the calls to the engine."""
    metrics.gauge(
        "fakevllm_siblings_in_flight",
        "Siblings at the engine, without the leads.",
        lambda: sibling_limit.in_flight,
    )
    metrics.gauge(
        "fakevllm_calls_open", "Calls that hold a slot at the server.", lambda: slots.num_open
    )
    metrics.labelled_gauge(
        "fakevllm_calls_waiting",
        "Calls that wait in the proxy for a slot at the server.",
        "kind",
        lambda: {"lead": slots.num_waiting_leads, "sibling": slots.num_waiting_siblings},
    )


def add_loss_gauges(metrics: Metrics, ledger: Ledger, link: SwarmLink) -> None:
    """Add the gauges of what is not stored or not trained."""
    metrics.gauge(
        "fakevllm_ledger_dropped",
        "Writes that the ledger gave up.",
        lambda: ledger.health.dropped,
    )
    metrics.labelled_gauge(
        "fakevllm_groups_dropped",
        "Groups that the swarm server's run dropped, by the first word of the reason.",
        "reason",
        lambda: link.dropped,
    )
