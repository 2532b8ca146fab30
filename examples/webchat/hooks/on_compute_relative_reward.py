"""Reward for answers to sums: 1 for the right number, minus a little for each superfluous word."""

from __future__ import annotations

import re
from typing import Any

SUM = re.compile(r"(\d+) plus (\d+)")
FREE_WORDS = 3
"""Number of words without a penalty."""
PENALTY_PER_WORD = 0.02
MAX_PENALTY = 0.2


def on_compute_relative_reward(
    valid_results: list[Any], all_answers: list[dict[str, Any]], question: str
) -> list[float | None]:
    numbers = SUM.search(question)
    if numbers is None:
        return [None] * len(all_answers)  # not a sum: serve the request, do not train it
    result = int(numbers[1]) + int(numbers[2])
    return [score(answer, result) for answer in all_answers]


def score(answer: dict[str, Any], result: int) -> float:
    """Return the reward of one answer, and add `is_right` to the answer for the ledger."""
    words = (answer.get("content") or "").split()
    number = re.search(r"(\d+)\.?$", words[-1]) if words else None
    answer["is_right"] = number is not None and int(number[1]) == result
    if not answer["is_right"] or answer["finish_reason"] != "stop":
        return 0.0
    return 1.0 - min(MAX_PENALTY, PENALTY_PER_WORD * max(0, len(words) - FREE_WORDS))
