"""What active clients measure is told with the step it was measured for."""

from __future__ import annotations

import doctest

from fakevllm_adapters.protocol.swarm import MAX_METRIC
from fakevllm_server.run import client_metrics
from fakevllm_server.run.client_metrics import MAX_NAME_CHARS, MAX_NAMES, ClientMetrics


def test_the_example_in_its_docstring_holds() -> None:
    assert doctest.testmod(client_metrics).failed == 0


def test_an_episode_that_says_nothing_of_a_name_does_not_count_in_its_mean() -> None:
    heard = ClientMetrics()
    heard.add({"a": 1.0, "b": 4.0})
    heard.add({"a": 2.0, "b": []})
    assert heard.take() == {"train_a": 1.5, "train_b": 4.0}


def test_the_largest_that_are_taken_have_a_mean() -> None:
    heard = ClientMetrics()
    heard.add({"a": [MAX_METRIC] * 1000, "b": -MAX_METRIC})
    heard.add({"a": MAX_METRIC, "b": -MAX_METRIC})
    assert heard.take() == {"train_a": MAX_METRIC, "train_b": -MAX_METRIC}


def test_names_that_are_too_many_or_too_long_are_told_and_not_kept() -> None:
    heard = ClientMetrics()
    assert heard.add({str(number): 0.0 for number in range(MAX_NAMES)}) == []
    assert heard.add({"more": 1.0, "0": 1.0}) == ["more"]
    assert heard.take()["train_0"] == 0.5
    assert heard.add({"x" * (MAX_NAME_CHARS + 1): 1.0}) == ["x" * (MAX_NAME_CHARS + 1)]
    assert heard.take() == {}
