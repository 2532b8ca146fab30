"""The load of engines, parsed from their metrics."""

from __future__ import annotations

import pytest

from fakevllm.console.sources.engine_loads import MAX_ENGINES, EngineLoad, parse_engine_loads

TWO_ENGINES = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="capacity"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:request_success_total{engine="0",model_name="m"} 9.0
"""


def test_each_engine_has_its_own_numbers() -> None:
    assert parse_engine_loads(TWO_ENGINES) == [EngineLoad("0", 3, 0), EngineLoad("1", 5, 2)]


def test_the_engines_of_a_replica_are_counted_together() -> None:
    page = """
vllm:num_requests_running{engine="0",replica="replica-0"} 3.0
vllm:num_requests_running{engine="1",replica="replica-0"} 4.0
vllm:num_requests_running{engine="0",replica="replica-1"} 5.0
"""
    loads = [EngineLoad("replica-0", 7, 0), EngineLoad("replica-1", 5, 0)]
    assert parse_engine_loads(page) == loads


def test_engines_are_in_the_order_of_their_numbers_and_not_too_many() -> None:
    names = [str(number) for number in reversed(range(MAX_ENGINES + 10))]
    lines = [f'vllm:num_requests_running{{engine="{name}"}} 1' for name in names]
    loads = parse_engine_loads("\n".join(lines))
    assert [load.name for load in loads] == [str(number) for number in range(MAX_ENGINES)]


@pytest.mark.parametrize("text", ["", "<html>", "# EOF", "other_metric 3"])
def test_a_text_without_these_metrics_has_no_engines(text: str) -> None:
    assert parse_engine_loads(text) == []
