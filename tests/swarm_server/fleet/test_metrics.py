"""The metrics of several replicas are one valid page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.backends.http.engine_metrics import EngineMetrics
from fakevllm_server.fleet.engine_figures import (
    PrefixCacheHits,
    parse_num_waiting,
    parse_prefix_cache,
)
from fakevllm_server.fleet.metrics import fleet_page
from fakevllm_server.fleet.replica import ReplicaFigures
from fakevllm_server.fleet.router import ReplicaState


def figures(name: str, state: ReplicaState) -> ReplicaFigures:
    return ReplicaFigures(name, state, 3, 2, 0, 1, None, None)


def samples(page: bytes) -> dict[tuple[str, str], float]:
    """Return the values by metric and replica. Raises ValueError for a page that is not valid."""
    return {
        (sample.name, sample.labels["replica"]): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name.startswith(("vllm:generation", "fakevllm_", "vllm:num_requests_running"))
    }


class CachingEngine(FakeEngine):
    """A fake engine that reports a prefix cache."""

    num_queried_tokens, num_reused_tokens = 8, 6


def test_the_prefix_cache_and_the_queue_are_read_from_the_metrics_of_an_engine() -> None:
    page = EngineMetrics(CachingEngine()).page()
    assert parse_prefix_cache(page) == PrefixCacheHits(num_queried=8, num_hit=6)
    assert parse_num_waiting(page) == 0
    assert parse_prefix_cache(EngineMetrics(FakeEngine()).page()) is None
    assert parse_num_waiting(b"") is None


def test_each_sample_names_its_replica_and_each_metric_occurs_once() -> None:
    pages: dict[str, bytes] = {}
    for number, name in enumerate(("replica-0", "replica-1")):
        metrics = EngineMetrics(FakeEngine())
        metrics.generation_tokens.inc(10 + number)
        pages[name] = metrics.page()
    page = fleet_page(
        [figures("replica-0", ReplicaState.SERVING), figures("replica-1", ReplicaState.LOADING)],
        pages,
    )
    values = samples(page)
    assert values["vllm:generation_tokens_total", "replica-0"] == 10
    assert values["vllm:generation_tokens_total", "replica-1"] == 11
    assert values["vllm:num_requests_running", "replica-1"] == 0
    assert values["fakevllm_replica_serving", "replica-0"] == 1
    assert values["fakevllm_replica_serving", "replica-1"] == 0
    assert values["fakevllm_replica_version", "replica-1"] == 3
    assert values["fakevllm_replica_running", "replica-1"] == 2
    assert values["fakevllm_replica_restarts", "replica-1"] == 1
    types = [line for line in page.decode().splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def test_a_page_that_cannot_be_parsed_hides_no_other_replica() -> None:
    good = EngineMetrics(FakeEngine()).page()
    page = fleet_page([], {"replica-0": b"no {metrics", "replica-1": good})
    assert ("vllm:num_requests_running", "replica-1") in samples(page)
