"""Reward an answer in the required format with 1, or a little less if it is long.

An answer in another format gets 0. Every answer in the required format gets at least 1 -
LENGTH_CAP. Therefore an answer never gains by leaving the format.

Lengths are compared only within the group. The median length is computed from the answers in the
required format. An answer longer than this median loses up to LENGTH_CAP. If you add a score for
quality, differences in quality should be larger than LENGTH_CAP.
"""

from __future__ import annotations

import re
from statistics import median

from fakevllm.hooks.spec import Json, Sibling

PATTERN = r"(?s).*\bAnswer: \S.*"
"""Regex of the required format. It must match the whole text."""
MUST_FINISH = True
"""Whether an answer that was cut off, or that calls a tool, counts as not in the required
format."""
LENGTH_CAP = 0.1
"""Maximum penalty for length. Answers of at least twice the median length get this penalty."""


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    passing = [passes(answer) for answer in all_answers]
    lengths = measure_lengths(valid_results, all_answers)
    passing_lengths = [length for length, ok in zip(lengths, passing, strict=True) if ok]
    median_length = median(passing_lengths) if passing_lengths else 0
    for answer, length, ok in zip(all_answers, lengths, passing, strict=True):
        answer["format_ok"] = ok
        answer["length"] = length
    return [
        1.0 - length_penalty(length, median_length) if ok else 0.0
        for length, ok in zip(lengths, passing, strict=True)
    ]


def passes(answer: Json) -> bool:
    """Return True if the answer has the required format."""
    is_complete = not MUST_FINISH or answer["finish_reason"] == "stop"
    return is_complete and re.fullmatch(PATTERN, answer.get("content") or "") is not None


def measure_lengths(siblings: list[Sibling], answers: list[Json]) -> list[int]:
    """Return the length of each answer. Lengths are in tokens if all token counts are known.
    Otherwise lengths are in characters."""
    tokens = [sibling.usage.get("completion_tokens") for sibling in siblings]
    if all(isinstance(count, int) for count in tokens):
        return [int(count or 0) for count in tokens]
    return [len(answer.get("content") or "") for answer in answers]


def length_penalty(length: int, median_length: float) -> float:
    """Return the penalty for an answer's length. The penalty is 0 up to the median length, then
    rises to LENGTH_CAP at twice the median, and stays there.

    >>> length_penalty(100, 100), round(length_penalty(150, 100), 3), length_penalty(900, 100)
    (0.0, 0.05, 0.1)
    """
    if median_length <= 0:
        return 0.0
    return LENGTH_CAP * min(1.0, max(0.0, length / median_length - 1.0))
