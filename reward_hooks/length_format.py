"""Keeps a format and discourages padding: 1 for an answer in the format, a little less for a long
one.

The format is a gate: an answer outside it gets 0, far below any answer inside it, so giving up the
format never pays. Length is compared within the group only, above the median of the answers that
passed, and costs at most LENGTH_CAP: quality, where you add it, keeps the upper hand.
"""

from __future__ import annotations

import re
from statistics import median

from fakevllm.hooks.spec import Json, Sibling

PATTERN = r"(?s).*\bAnswer: \S.*"
"""What the whole text must match."""
MUST_FINISH = True
"""An answer that was cut off is outside the format."""
LENGTH_CAP = 0.1
"""Most that length may cost: reached at twice the passing median."""


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    passing = [passes(answer) for answer in all_answers]
    lengths = measure(valid_results, all_answers)
    passed_lengths = [length for length, ok in zip(lengths, passing, strict=True) if ok]
    usual = median(passed_lengths) if passed_lengths else 0
    for answer, length, ok in zip(all_answers, lengths, passing, strict=True):
        answer["format_ok"] = ok
        answer["length"] = length
    return [
        1.0 - penalty(length, usual) if ok else 0.0
        for length, ok in zip(lengths, passing, strict=True)
    ]


def passes(answer: Json) -> bool:
    is_whole = not MUST_FINISH or answer["finish_reason"] == "stop"
    return is_whole and re.fullmatch(PATTERN, answer.get("content") or "") is not None


def measure(siblings: list[Sibling], answers: list[Json]) -> list[int]:
    """In tokens where all are known, else in characters: never a mixture."""
    tokens = [sibling.usage.get("completion_tokens") for sibling in siblings]
    if all(isinstance(count, int) for count in tokens):
        return [int(count or 0) for count in tokens]
    return [len(answer.get("content") or "") for answer in answers]


def penalty(length: int, usual: float) -> float:
    """
    >>> penalty(100, 100), round(penalty(150, 100), 3), penalty(900, 100)
    (0.0, 0.05, 0.1)
    """
    if usual <= 0:
        return 0.0
    return LENGTH_CAP * min(1.0, max(0.0, length / usual - 1.0))
