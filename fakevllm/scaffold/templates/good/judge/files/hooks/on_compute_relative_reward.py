"""Let a judge score the answers: another model at an OpenAI-compatible server.

Set FAKEVLLM_JUDGE_BASE_URL, _MODEL and _API_KEY, and edit RUBRIC in llm_judge.py. Until the first
variable is set, `stand_in_score` takes the judge's place, so that everything else can be tried.
"""

from __future__ import annotations

import os
from functools import cache

import llm_judge

from fakevllm.hooks.spec import Json, Sibling

ENOUGH_WORDS = 3
"""Number of words below which an answer loses reward. Without it, the model would learn to say
nothing."""


async def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    if os.environ.get("FAKEVLLM_JUDGE_BASE_URL"):
        return await llm_judge.on_compute_relative_reward(valid_results, all_answers, question)
    warn_once()
    for answer in all_answers:
        answer["judge"] = "stand-in"  # stored in the ledger
    return [stand_in_score(answer) for answer in all_answers]


def stand_in_score(answer: Json) -> float:
    """Return the reward of one answer: 0 if it is not complete, and more for fewer words."""
    num_words = len((answer.get("content") or "").split())
    if answer["finish_reason"] != "stop" or not num_words:
        return 0.0
    return min(num_words, ENOUGH_WORDS) / max(num_words, ENOUGH_WORDS)


@cache
def warn_once() -> None:
    """Print a warning to the proxy's log, once per hook process."""
    print("No judge is asked, and a simple rule scores the answers: set FAKEVLLM_JUDGE_BASE_URL.")
