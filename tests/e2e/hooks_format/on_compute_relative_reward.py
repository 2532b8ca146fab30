"""Reward one of the three formats of the demo model's answers.

Before training, a third of the answers have this format, whatever the question is."""

from __future__ import annotations

import re

from fakevllm.hooks.spec import Json, Sibling

FORMAT = re.compile(r"It is \d+\.")


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json]
) -> list[float | None]:
    return [score(answer) for answer in all_answers]


def score(answer: Json) -> float:
    """Return 1 for a finished answer in the format, correct or not, and 0 otherwise."""
    content = answer.get("content") or ""
    return float(answer["finish_reason"] == "stop" and FORMAT.fullmatch(content) is not None)
