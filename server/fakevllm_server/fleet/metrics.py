"""The Prometheus metrics of a fleet on one page. Each sample of a replica has the further label
`replica`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from fakevllm_adapters.http.asgi import Headers
from fakevllm_server.fleet.replica import ReplicaFigures
from fakevllm_server.fleet.router import ReplicaState

PAGE_HEADERS: Headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
REPLICA_LABEL = "replica"
GAUGES = {
    "fakevllm_replica_serving": "1 if the rollout replica answers new calls, otherwise 0.",
    "fakevllm_replica_version": "Version of the weights that the rollout replica serves.",
    "fakevllm_replica_running": "Number of calls that the rollout replica answers now.",
    "fakevllm_replica_restarts": "Number of times that the rollout replica was taken out.",
}
"""The server's own gauges, each with its help text."""


def fleet_page(figures: Sequence[ReplicaFigures], pages: Mapping[str, bytes]) -> bytes:
    """Return the page of metrics. `pages` are the pages of the replicas by name. A malformed page
    is left out."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families([*_own_gauges(figures), *_merged(pages)]))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _own_gauges(figures: Sequence[ReplicaFigures]) -> list[Metric]:
    gauges = {
        name: GaugeMetricFamily(name, text, labels=[REPLICA_LABEL]) for name, text in GAUGES.items()
    }
    for each in figures:
        values = (
            float(each.state is ReplicaState.SERVING),
            each.version,
            each.num_running,
            each.num_restarts,
        )
        for gauge, value in zip(gauges.values(), values, strict=True):
            gauge.add_metric([each.name], value)
    return list(gauges.values())


def _merged(pages: Mapping[str, bytes]) -> Iterable[Metric]:
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        try:
            parsed = list(text_string_to_metric_families(page.decode()))
        except ValueError:  # isolated: one replica must not hide the others
            continue
        for family in parsed:
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, REPLICA_LABEL: replica}
                merged.add_sample(sample.name, labels, sample.value)
    return families.values()
