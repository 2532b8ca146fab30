"""An example of a hook: answers to sums, such as `What is 3 plus 4?`, get reward 1 if they end with
the right number. Replace it by your own, and try it with `fakevllm check-hook hooks`."""

import re

SUM = re.compile(r"(\d+) plus (\d+)")


def on_compute_relative_reward(valid_results, all_answers, question):
    numbers = SUM.search(question)
    if numbers is None:
        return [None] * len(all_answers)  # the question is no sum: do not train its answers
    right = int(numbers[1]) + int(numbers[2])
    return [float(last_number(answer) == right) for answer in all_answers]


def last_number(answer):
    """Return the last number of a finished answer, or None."""
    numbers = re.findall(r"\d+", answer.get("content") or "")
    return int(numbers[-1]) if numbers and answer["finish_reason"] == "stop" else None
