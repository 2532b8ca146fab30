"""The users of this chat ask sums. The right number earns 1, and a chat has short answers: every
word beyond FREE_WORDS costs a little."""

from __future__ import annotations

import re
from typing import Any

ASKED = re.compile(r"(\d+) plus (\d+)")
FREE_WORDS = 3
PER_WORD = 0.02
MOST_OFF = 0.2


def on_compute_relative_reward(
    valid_results: list[Any], all_answers: list[dict[str, Any]], question: str
) -> list[float | None]:
    asked = ASKED.search(question)
    if asked is None:
        return [None] * len(all_answers)  # nothing this hook can judge: serve, do not train
    right = int(asked[1]) + int(asked[2])
    return [score(answer, right) for answer in all_answers]


def score(answer: dict[str, Any], right: int) -> float:
    words = (answer.get("content") or "").split()
    said = re.search(r"(\d+)\.?$", words[-1]) if words else None
    answer["is_right"] = said is not None and int(said[1]) == right  # kept in the ledger
    if not answer["is_right"] or answer["finish_reason"] != "stop":
        return 0.0
    return 1.0 - min(MOST_OFF, PER_WORD * max(0, len(words) - FREE_WORDS))
