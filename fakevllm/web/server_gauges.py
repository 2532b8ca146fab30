"""The gauges for `/metrics` about the swarm server: whether it answers, the state of its engine,
and how far training is. The proxy's latest status of the server has the values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fakevllm.metrics import Metrics
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply

Status = Callable[[], EngineStatusReply | None]


def add_server_gauges(metrics: Metrics, status: Status) -> None:
    """Add the gauges of the swarm server to the metrics. `status` returns the latest status of the
    server, or None while the server does not answer."""
    metrics.gauge(
        "fakevllm_server_reachable",
        "1 while the swarm server answers.",
        lambda: status() is not None,
    )
    metrics.labelled_gauge(
        "fakevllm_engine_state",
        "1 for the engine's state, and 0 for the others; all are 0 while the server is away.",
        "state",
        lambda: _states(status()),
    )
    metrics.gauge(
        "fakevllm_training_steps",
        "Steps that the server's run has trained; NaN while the server is away.",
        lambda: _num_steps(status()),
    )
    metrics.gauge(
        "fakevllm_weight_version",
        "Version of the weights that the engine serves; NaN while the server is away.",
        lambda: _value(status(), lambda one: one.weight_version),
    )
    metrics.gauge(
        "fakevllm_backlog_batches",
        "Batches that the finished groups would fill; a step is due at 1. NaN while the server is "
        "away.",
        lambda: _value(status(), lambda one: one.backlog),
    )


def _states(status: EngineStatusReply | None) -> Mapping[str, float]:
    """Return 1 for the engine's state and 0 for the others, by the state's name in small letters,
    such as `rolling`."""
    current = None if status is None else status.engine_status
    return {
        state.value.partition(".")[2].lower(): float(state is current) for state in EngineStatus
    }


def _num_steps(status: EngineStatusReply | None) -> float:
    """Return the number of trained steps. `global_step` is the number of the step that comes
    next."""
    if status is None or status.global_step is None:
        return math.nan
    return status.global_step - 1


def _value(status: EngineStatusReply | None, read: Callable[[EngineStatusReply], float]) -> float:
    return math.nan if status is None else read(status)
