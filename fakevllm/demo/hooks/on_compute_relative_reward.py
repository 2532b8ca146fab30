"""The demo's reward hook. It scores the siblings and returns one reward per sibling. Siblings are
the answers that were sampled for one request.

Only the differences between the rewards of one request's siblings influence the training.
"""

import re
from typing import Any

from fakevllm.hooks.spec import Sibling

LAST_NUMBER = re.compile(r"(\d+)\.?$")


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[dict[str, Any]], question: str
) -> list[float]:
    return [score(*pair) for pair in zip(valid_results, all_answers, strict=True)]


def score(sibling: Sibling, answer: dict[str, Any]) -> float:
    """Return 1 for a finished answer that ends with the right sum, otherwise 0."""
    number = LAST_NUMBER.search((answer.get("content") or "").strip())
    is_right = number is not None and int(number[1]) == sibling.task.metadata["sum"]
    return float(is_right and answer["finish_reason"] == "stop")
