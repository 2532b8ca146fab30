"""Rewards one of the three ways in which the demo model words its answers: a third of them at the
start, whatever it is asked."""

from __future__ import annotations

import re

from fakevllm.hooks.spec import Json, Sibling

FORMAT = re.compile(r"It is \d+\.")


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json]
) -> list[float | None]:
    return [score(answer) for answer in all_answers]


def score(answer: Json) -> float:
    """1 for a finished answer in the format, right or wrong; else 0."""
    said = answer.get("content") or ""
    return float(answer["finish_reason"] == "stop" and FORMAT.fullmatch(said) is not None)
