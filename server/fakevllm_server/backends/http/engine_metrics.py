"""Prometheus metrics of an engine. The metrics have the same names as in vLLM, so that autoscalers
and dashboards for vLLM work unchanged. Other metrics of vLLM, which such programs do not read, are
left out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol, runtime_checkable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from fakevllm_server.backends.http.engine_wrapper import EngineWrapper
from fakevllm_server.types.backend import TokenEngine
from fakevllm_server.types.sampling import Sampling, Token

LABELS = ("model_name", "engine")
FINISH_REASONS = ("stop", "length", "abort", "error")
# The buckets are vLLM's, so that dashboards made for vLLM fit.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


@runtime_checkable
class HasPrefixCache(Protocol):
    """Interface of an engine with a cache of prompts' beginnings."""

    @property
    def num_queried_tokens(self) -> int:
        """Number of prompt tokens that were looked up in the cache."""
        ...

    @property
    def num_reused_tokens(self) -> int:
        """Number of prompt tokens that were found in the cache."""
        ...


class EngineMetrics:
    """The Prometheus metrics of one engine, in a Prometheus registry of their own."""

    def __init__(self, engine: TokenEngine) -> None:
        self.num_in_flight = 0
        """Number of `generate` calls that have not ended, running or waiting."""
        self._series = series = _Series(engine.model_name)
        series.gauge(
            "num_requests_running",
            "Number of requests in model execution batches.",
            lambda: max(self.num_in_flight - engine.num_waiting, 0),
        )
        series.gauge(
            "num_requests_waiting",
            "Number of requests waiting to be processed.",
            lambda: engine.num_waiting,
        )
        if isinstance(engine, HasPrefixCache):
            series.registry.register(_PrefixCacheCounters(engine, series.labels))
        self.prompt_tokens = series.counter("prompt_tokens", "Number of prefill tokens processed.")
        self.generation_tokens = series.counter(
            "generation_tokens", "Number of generation tokens processed."
        )
        self.success = series.counter_by_finish_reason(
            "request_success", "Count of successfully processed requests."
        )
        self.first_token = series.histogram(
            "time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            FIRST_TOKEN_BUCKETS,
        )
        self.latency = series.histogram(
            "e2e_request_latency_seconds",
            "Histogram of e2e request latency in seconds.",
            LATENCY_BUCKETS,
        )

    @property
    def registry(self) -> CollectorRegistry:
        """All metrics of the engine."""
        return self._series.registry

    def page(self) -> bytes:
        """Return the body of /metrics: all metrics of the engine in Prometheus' text format."""
        return self._series.page()


class _Series:
    """Creates the Prometheus counters, gauges and histograms of an engine, with vLLM's name prefix
    and labels."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.labels = (model_name, "0")

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        gauge = Gauge(f"vllm:{name}", help, LABELS, registry=self.registry)
        gauge.labels(*self.labels).set_function(read)

    def counter(self, name: str, help: str) -> Counter:
        counter = Counter(f"vllm:{name}", help, LABELS, registry=self.registry)
        return counter.labels(*self.labels)

    def counter_by_finish_reason(self, name: str, help: str) -> dict[str, Counter]:
        """Create one counter with the label `finished_reason`. Return a dict with the counter for
        each value of this label."""
        labels = (*LABELS, "finished_reason")
        counter = Counter(f"vllm:{name}", help, labels, registry=self.registry)
        return {reason: counter.labels(*self.labels, reason) for reason in FINISH_REASONS}

    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", help, LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(*self.labels)

    def page(self) -> bytes:
        return generate_latest(self.registry)


class _PrefixCacheCounters(Collector):
    """Reads the counters of an engine's prefix cache whenever the metrics are read."""

    def __init__(self, engine: HasPrefixCache, labels: Sequence[str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        for name, help, value in (
            ("queries", "Number of queried tokens.", self._engine.num_queried_tokens),
            ("hits", "Number of cached tokens.", self._engine.num_reused_tokens),
        ):
            family = CounterMetricFamily(f"vllm:prefix_cache_{name}", help, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family


class MeasuredEngine(EngineWrapper):
    """A TokenEngine that passes requests on to another TokenEngine and records metrics about
    them."""

    def __init__(self, engine: TokenEngine, metrics: EngineMetrics | None = None) -> None:
        """Wrap `engine`, and record its requests in `metrics`. If `metrics` is None, create new
        metrics."""
        super().__init__(engine, engine.model_name)
        self.metrics = metrics or EngineMetrics(engine)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        metrics = self.metrics
        start_time = time.monotonic()
        metrics.num_in_flight += 1
        reason = "error"
        num_tokens = 0
        last_id = -1
        try:
            async with aclosing(self._engine.generate(prompt_ids, sampling)) as batches:
                async for batch in batches:
                    if not num_tokens:
                        metrics.prompt_tokens.inc(len(prompt_ids))
                        # A request that is not live gets all tokens at once, so the time to its
                        # first token would be the time to its last.
                        if sampling.live:
                            metrics.first_token.observe(time.monotonic() - start_time)
                    metrics.generation_tokens.inc(len(batch))
                    num_tokens, last_id = num_tokens + len(batch), batch[-1].id
                    yield batch
            is_eos = last_id in self.eos_ids and not sampling.ignore_eos
            reason = "stop" if is_eos or last_id in sampling.stop_ids else "length"
        except GeneratorExit:
            reason = "stop"  # the caller found a stop string
            raise
        except Exception:
            raise
        except BaseException:
            reason = "abort"
            raise
        finally:
            metrics.num_in_flight -= 1
            metrics.success[reason].inc()
            metrics.latency.observe(time.monotonic() - start_time)
