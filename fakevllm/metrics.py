"""What the proxy counts, for Prometheus: a registry of its own, shown beside the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fakevllm.ledger.records import GroupRecord, SiblingRecord

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class _Counts(Collector):
    """Numbers that are counted elsewhere."""

    def __init__(
        self, name: str, told: str, label: str, values: Callable[[], Mapping[str, float]]
    ) -> None:
        self._name, self._told, self._label, self._values = name, told, label, values

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._told, labels=[self._label])
        for word, value in self._values().items():
            family.add_metric([word], value)
        yield family


class Metrics:
    def __init__(
        self,
        open_requests: Callable[[], float],
        dropped: Callable[[], float],
        siblings_in_flight: Callable[[], float],
    ) -> None:
        """`open_requests`: requests not yet answered; `dropped`: writes the ledger gave up;
        `siblings_in_flight`: beside the leads, of all requests."""
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "fakevllm_requests",
            "Requests of apps that have ended, by what became of their group at first.",
            ["route", "state", "reason"],
            registry=self._registry,
        )
        self._siblings = Counter(
            "fakevllm_siblings",
            "Completions asked of the engine.",
            ["route"],
            registry=self._registry,
        )
        self._latency = Histogram(
            "fakevllm_request_latency_seconds",
            "From a request's arrival to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._cut = Counter(
            "fakevllm_groups_cut",
            "Groups with fewer siblings than asked for, by the reason.",
            ["route", "reason"],
            registry=self._registry,
        )
        self._feedback = Counter(
            "fakevllm_feedback",
            "What was said of answers, or followed them and counts, by its kind.",
            ["kind"],
            registry=self._registry,
        )
        self._resent = Counter(
            "fakevllm_requests_resent",
            "Requests that were sent again and got the answer of the first time.",
            ["route"],
            registry=self._registry,
        )
        self._failed = Counter(
            "fakevllm_siblings_failed",
            "Completions without an answer (no_answer), or in groups whose answer is none, by why.",
            ["route", "failure"],
            registry=self._registry,
        )
        self._rewards = Summary(
            "fakevllm_reward",
            "Rewards of all siblings (policy), and of what apps got: the best, any (random), the "
            "lead, or a greedy answer.",
            ["route", "series"],
            registry=self._registry,
        )
        # Each look-up takes a lock and a list; of what is counted for each request there are few.
        self._ended = cache(self._requests.labels)
        self._asked_for = cache(self._siblings.labels)
        self._took = cache(self._latency.labels)
        for name, told, value in (
            ("fakevllm_requests_open", "Requests being answered.", open_requests),
            ("fakevllm_siblings_in_flight", "Siblings beside the leads.", siblings_in_flight),
            ("fakevllm_ledger_dropped", "Writes the ledger gave up.", dropped),
        ):
            Gauge(name, told, registry=self._registry).set_function(value)

    def gauge(self, name: str, told: str, value: Callable[[], float]) -> None:
        """One more number, asked for whenever somebody looks."""
        Gauge(name, told, registry=self._registry).set_function(value)

    def counts(
        self, name: str, told: str, label: str, values: Callable[[], Mapping[str, float]]
    ) -> None:
        """A number for each word, asked for whenever somebody looks."""
        self._registry.register(_Counts(name, told, label, values))

    def resent(self, route: str) -> None:
        self._resent.labels(route).inc()

    def said(self, kind: str) -> None:
        """`kind` of a feedback."""
        self._feedback.labels(kind).inc()

    def ended(self, group: GroupRecord) -> None:
        reason = (group.reason or "").partition(":")[0]
        self._ended(group.route, group.state, reason).inc()
        self._asked_for(group.route).inc(len(group.siblings))
        self._took(group.route).observe(group.latency_s)
        if group.cut is not None:
            self._cut.labels(group.route, group.cut.partition(":")[0]).inc()
        for sibling in group.siblings:
            failure = sibling.failure or ("no_answer" if sibling.error is not None else None)
            if failure is not None:
                self._failed.labels(group.route, failure).inc()
            if sibling.reward is not None:
                self._rewarded(group, sibling, sibling.reward)

    def _rewarded(self, group: GroupRecord, sibling: SiblingRecord, reward: float) -> None:
        if not (group.served_by == "greedy" and sibling.index == 0):  # no sample of the policy
            self._rewards.labels(group.route, "policy").observe(reward)
        if sibling.served and group.served_by is not None:
            self._rewards.labels(group.route, group.served_by).observe(reward)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
