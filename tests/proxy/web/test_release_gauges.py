"""The metrics of the release gate."""

from __future__ import annotations

from typing import Any

from fakevllm.gate.release_gate import GateView
from fakevllm.metrics import Metrics
from fakevllm.web.release_gauges import add_release_gauges

EVALUATION = {"pairs": 12, "difference": 0.25, "low": -0.125, "high": 0.5, "source": "held_out"}


def lines_of(view: GateView) -> set[str]:
    metrics = Metrics()
    add_release_gauges(metrics, lambda: view)
    lines = metrics.text().decode().splitlines()
    return {line for line in lines if line.startswith(("fakevllm_release", "fakevllm_evaluation"))}


def test_a_candidate_its_interval_and_all_decisions_are_shown() -> None:
    decisions = {"candidate": 2, "released": 1}
    shown = lines_of(GateView(20, 40, False, 12, None, False, decisions, lambda: EVALUATION))
    assert shown == {
        'fakevllm_release_version{role="released"} 20.0',
        'fakevllm_release_version{role="candidate"} 40.0',
        'fakevllm_release_decisions{decision="candidate"} 2.0',
        'fakevllm_release_decisions{decision="released"} 1.0',
        "fakevllm_release_held 0.0",
        "fakevllm_release_blocked 0.0",
        "fakevllm_evaluation_pairs 12.0",
        'fakevllm_evaluation_difference{bound="low"} -0.125',
        'fakevllm_evaluation_difference{bound="mean"} 0.25',
        'fakevllm_evaluation_difference{bound="high"} 0.5',
    }


def test_what_is_not_known_has_no_line() -> None:
    shown = lines_of(GateView(None, None, True, 0, "the disk is full", True, {}, dict))
    assert shown == {
        "fakevllm_release_held 1.0",
        "fakevllm_release_blocked 1.0",
        "fakevllm_evaluation_pairs 0.0",
    }


def test_the_interval_is_computed_once_for_a_page_of_metrics() -> None:
    computed: list[str] = []

    def progress() -> dict[str, Any]:
        computed.append("interval")
        return EVALUATION

    lines_of(GateView(20, 40, False, 12, None, False, {}, progress))
    assert computed == ["interval"]


def test_the_gate_is_not_blocked_while_the_server_is_busy() -> None:
    shown = lines_of(GateView(20, 40, False, 12, "the server is busy", False, {}, dict))
    assert "fakevllm_release_blocked 0.0" in shown
