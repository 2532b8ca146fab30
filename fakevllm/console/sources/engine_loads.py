"""The load of each engine, parsed from the Prometheus metrics of the server's engines. This module
does no I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

MAX_ENGINES = 64
"""Maximum number of engines that are shown."""
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_ENGINE_LABEL = "engine"
_REPLICA_LABEL = "replica"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The number of requests that one engine has now."""

    name: str
    """Number of the engine, or name of the replica. A vLLM with data parallelism has several
    engines, numbered from 0. If the server has several replicas, the engines of a replica are
    counted together."""
    num_running: int
    num_waiting: int


def parse_engine_loads(metrics: str) -> list[EngineLoad]:
    """Return the load of each engine. `metrics` is a text of Prometheus metrics with vLLM's names.
    Raises an exception of any type if the text is malformed.

    >>> text = 'vllm:num_requests_running{engine="0"} 3.0\\nvllm:num_requests_waiting{engine="0"} 1'
    >>> parse_engine_loads(text)
    [EngineLoad(name='0', num_running=3, num_waiting=1)]
    """
    lines = [line for line in metrics.splitlines() if line.startswith((_RUNNING, _WAITING))]
    running, waiting = Counter[str](), Counter[str]()
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            labels = sample.labels
            name = labels.get(_REPLICA_LABEL) or labels.get(_ENGINE_LABEL, "0")
            if sample.name == _RUNNING:
                running[name] += max(0, int(sample.value))
            elif sample.name == _WAITING:
                waiting[name] += max(0, int(sample.value))
    names = sorted({*running, *waiting}, key=lambda name: (len(name), name))
    return [EngineLoad(name, running[name], waiting[name]) for name in names[:MAX_ENGINES]]
