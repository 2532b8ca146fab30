"""Limits that are written in several places, because importing them would be slow or forbidden."""

from __future__ import annotations

from fakevllm.cli import evaluate
from fakevllm.evaluation import messages
from fakevllm_server.training.policies import MAX_UNPINNED


def test_the_command_and_the_proxy_have_the_same_limit_of_samples() -> None:
    assert evaluate.MAX_SAMPLES == messages.MAX_SAMPLES


def test_an_engine_can_hold_all_versions_of_an_evaluation() -> None:
    assert messages.MAX_VERSIONS <= MAX_UNPINNED
