"""The page that lists the Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from docs.reference_pages.markdown import Page, code, prose, section, table
from docs.reference_pages.running import proxy_parts
from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.backends.http.engine_metrics import EngineMetrics

INTRODUCTION = """\
This page lists the metrics for Prometheus. `GET /metrics` of the proxy returns the metrics of the \
proxy and of the engine. `GET /metrics` of the server returns those of the engine. \
[Inspect a run](../records.md) explains the curves of training, which are not among these metrics.

A histogram *name* has the series `name_bucket`, `name_sum` and `name_count`. A summary *name* has \
the series `name_sum` and `name_count`."""
PROXY = """\
On Linux, the proxy also reports memory, CPU time and open files of its process, with names that \
begin with `fakevllm_proxy_process_`. Metrics about the release gate and about arms exist only \
if the [mode is `gated`](../releases.md), or if there is a \
[baseline](../evaluation.md#how-much-did-training-help)."""
ENGINE = """\
The embedded engine and the fake engine report these metrics of vLLM, under vLLM's names. \
The embedded engine also counts the tokens that it looks up and finds in its cache of prompts \
(`vllm:prefix_cache_queries_total` and `vllm:prefix_cache_hits_total`). vLLM itself reports more. \
On Linux, these engines also report memory, CPU time and open files of \
their process, with names that begin with `process_`."""
_PROCESS = ("fakevllm_proxy_process_", "process_", "python_")
"""Beginnings of the names of metrics that depend on the operating system."""
_SUFFIX = {"counter": "_total"}
"""End of a series' name by the metric's type."""


def page() -> Page:
    """Return the page with the metrics of the proxy and of the engine."""
    _, proxy = proxy_parts()
    engine = EngineMetrics(FakeEngine()).registry
    return Page(
        "Metrics",
        INTRODUCTION,
        [
            section("The proxy", PROXY, _table(proxy)),
            section("The engine", ENGINE, _table(engine)),
        ],
    )


def _table(registry: CollectorRegistry) -> str:
    rows = [
        [
            code(family.name + _SUFFIX.get(family.type, "")),
            family.type,
            ", ".join(code(label) for label in labels),
            prose(family.documentation),
        ]
        for family, labels in sorted(_families(registry), key=lambda one: one[0].name)
        if not family.name.startswith(_PROCESS)
    ]
    return table(["metric", "type", "labels", "meaning"], rows)


def _families(registry: CollectorRegistry) -> Iterator[tuple[Metric, Sequence[str]]]:
    """Yield each metric with the names of its labels. prometheus_client publishes no labels of a
    metric without samples, so they are read from its private attributes."""
    collectors: Mapping[Any, Any] = vars(registry)["_collector_to_names"]
    for collector in collectors:
        for family in collector.collect():
            yield family, getattr(collector, "_labelnames", getattr(family, "_labelnames", ()))
