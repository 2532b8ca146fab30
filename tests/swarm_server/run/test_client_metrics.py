"""Metrics that active clients send are averaged for each step."""

from __future__ import annotations

import doctest

from fakevllm_adapters.protocol.swarm import MAX_METRIC
from fakevllm_server.run import client_metrics
from fakevllm_server.run.client_metrics import MAX_NAME_CHARS, MAX_NAMES, ClientMetrics


def test_the_docstring_example_holds() -> None:
    assert doctest.testmod(client_metrics).failed == 0


def test_an_episode_without_a_metric_does_not_count_in_its_mean() -> None:
    metrics = ClientMetrics()
    metrics.add({"a": 1.0, "b": 4.0})
    metrics.add({"a": 2.0, "b": []})
    assert metrics.take() == {"train_a": 1.5, "train_b": 4.0}


def test_the_largest_accepted_values_have_a_mean() -> None:
    metrics = ClientMetrics()
    metrics.add({"a": [MAX_METRIC] * 1000, "b": -MAX_METRIC})
    metrics.add({"a": MAX_METRIC, "b": -MAX_METRIC})
    assert metrics.take() == {"train_a": MAX_METRIC, "train_b": -MAX_METRIC}


def test_too_many_names_and_too_long_names_are_refused() -> None:
    metrics = ClientMetrics()
    assert metrics.add({str(number): 0.0 for number in range(MAX_NAMES)}) == []
    assert metrics.add({"more": 1.0, "0": 1.0}) == ["more"]
    assert metrics.take()["train_0"] == 0.5
    assert metrics.add({"x" * (MAX_NAME_CHARS + 1): 1.0}) == ["x" * (MAX_NAME_CHARS + 1)]
    assert metrics.take() == {}
