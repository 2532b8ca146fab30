"""The proxy's Prometheus metrics. They are kept in a Prometheus registry of their own. GET /metrics
returns the proxy's metrics together with the engine's metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    Summary,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fakevllm.ledger.records import GroupRecord, SiblingRecord
from fakevllm.release.arms import Arm

_TRAINED_ARMS = (None, Arm.TRAINING.value)
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class _LabelledGauge(Collector):
    """A Prometheus gauge with one label. At each scrape, a callback returns the gauge's value for
    each value of the label."""

    def __init__(
        self, name: str, help_text: str, label: str, values: Callable[[], Mapping[str, float]]
    ) -> None:
        self._name = name
        self._help_text = help_text
        self._label = label
        self._values = values

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._help_text, labels=[self._label])
        for label_value, value in self._values().items():
            family.add_metric([label_value], value)
        yield family


class Metrics:
    """The proxy's metrics. Methods of this class count requests, siblings and user feedback.
    Siblings are the answers that were sampled for one request. `gauge` and `labelled_gauge` add
    metrics whose values come from a callback."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        """All metrics of the proxy."""
        # Memory, CPU time and open files. The engine's metrics on the same page have these names
        # without the prefix.
        ProcessCollector(namespace="fakevllm_proxy", registry=self.registry)
        self._requests = Counter(
            "fakevllm_requests",
            "Requests that have ended, by the first state of their group and its reason.",
            ["route", "state", "reason"],
            registry=self.registry,
        )
        self._siblings = Counter(
            "fakevllm_siblings",
            "Completions requested from the engine.",
            ["route"],
            registry=self.registry,
        )
        self._latency = Histogram(
            "fakevllm_request_latency_seconds",
            "Seconds from a request's arrival to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._cut = Counter(
            "fakevllm_groups_cut",
            "Groups with fewer siblings than configured, by the reason.",
            ["route", "reason"],
            registry=self.registry,
        )
        self._feedback = Counter(
            "fakevllm_feedback",
            "Feedback about answers, by its kind; next messages and regenerations only if they "
            "have a value.",
            ["kind"],
            registry=self.registry,
        )
        self._resent = Counter(
            "fakevllm_requests_resent",
            "Requests that were sent again and got the answer of their first attempt.",
            ["route"],
            registry=self.registry,
        )
        self._failed = Counter(
            "fakevllm_siblings_failed",
            "Completions without an answer (no_answer) and, in groups, completions whose answer "
            "failed, by the failure.",
            ["route", "failure"],
            registry=self.registry,
        )
        self._rewards = Summary(
            "fakevllm_reward",
            "Rewards of all siblings (series policy) and of the served ones (series best, random, "
            "lead or greedy, by how the answer was chosen).",
            ["route", "series"],
            registry=self.registry,
        )
        # A label look-up takes a lock and builds a list. These labels are used for each request and
        # have few values, so their look-ups are cached.
        self._requests_by_end = cache(self._requests.labels)
        self._siblings_by_route = cache(self._siblings.labels)
        self._latency_by_route = cache(self._latency.labels)
        self._rewards_by_kind = cache(self._rewards.labels)

    def gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is read from the callback `value` at each scrape."""
        Gauge(name, help_text, registry=self.registry).set_function(value)

    def labelled_gauge(
        self, name: str, help_text: str, label: str, values: Callable[[], Mapping[str, float]]
    ) -> None:
        """Add a gauge with one label. At each scrape, the callback `values` returns the gauge's
        value for each value of the label."""
        self.registry.register(_LabelledGauge(name, help_text, label, values))

    def request_resent(self, route: str) -> None:
        """Count a request that an app sent again and that got the answer to the first attempt."""
        self._resent.labels(route).inc()

    def feedback_received(self, kind: str) -> None:
        """Count one item of feedback on an answer, labelled with the feedback's kind."""
        self._feedback.labels(kind).inc()

    def group_ended(self, group: GroupRecord) -> None:
        """Count an ended request, its siblings and their rewards. Siblings are the answers that
        were sampled for the request. `group` is the complete record of the request and its
        siblings, as the ledger (the proxy's database) stores it."""
        reason = (group.reason or "").partition(":")[0]
        self._requests_by_end(group.route, group.state, reason).inc()
        self._siblings_by_route(group.route).inc(len(group.siblings))
        self._latency_by_route(group.route).observe(group.latency_s)
        if group.cut is not None:
            self._cut.labels(group.route, group.cut.partition(":")[0]).inc()
        for sibling in group.siblings:
            failure = sibling.failure or ("no_answer" if sibling.error is not None else None)
            if failure is not None:
                self._failed.labels(group.route, failure).inc()
            if sibling.reward is not None and group.arm in _TRAINED_ARMS:
                self._observe_reward(group, sibling, sibling.reward)

    def _observe_reward(self, group: GroupRecord, sibling: SiblingRecord, reward: float) -> None:
        # A greedy lead (the app's own request at temperature 0) is no sample of the policy.
        if not (group.served_by == "greedy" and sibling.index == 0):
            self._rewards_by_kind(group.route, "policy").observe(reward)
        if sibling.served and group.served_by is not None:
            self._rewards_by_kind(group.route, group.served_by).observe(reward)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
