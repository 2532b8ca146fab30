"""Called when the siblings have answered: one number each. Only differences within the group
count."""

import re

LAST_NUMBER = re.compile(r"(\d+)\.?$")


def on_compute_relative_reward(valid_results, all_answers, question):
    return [
        score(sibling, answer) for sibling, answer in zip(valid_results, all_answers, strict=True)
    ]


def score(sibling, answer):
    """1 for a finished answer that ends in the right sum, else 0."""
    number = LAST_NUMBER.search((answer.get("content") or "").strip())
    is_right = number is not None and int(number[1]) == sibling.task.metadata["sum"]
    return float(is_right and answer["finish_reason"] == "stop")
