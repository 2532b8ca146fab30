"""The reward hook of the arms. An answer is right or wrong.

The proxy runs the text of this file in a process of its own, so the file imports nothing from the
benchmarks.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from fakevllm.hooks.spec import Sibling

Json = dict[str, Any]

LAST_NUMBER = re.compile(r"It is (\d+)\.")
EXPRESSION = re.compile(r"\d{1,9}( [+*-] \d{1,9}){0,9}")


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float]:
    return [
        float(is_right(sibling.task.metadata, answer))
        for sibling, answer in zip(valid_results, all_answers, strict=True)
    ]


def is_right(row: Json, answer: Json) -> bool:
    """Return True if an assistant message is a finished and right answer to a dataset row."""
    return answer["finish_reason"] != "length" and CHECKS[row["kind"]](row, answer)


def _is_right_sum(row: Json, answer: Json) -> bool:
    number = LAST_NUMBER.fullmatch(_text(answer))
    return number is not None and int(number[1]) == row["answer"]


def _is_right_expression(row: Json, answer: Json) -> bool:
    text = _text(answer)
    if EXPRESSION.fullmatch(text) is None:
        return False
    if sorted(map(int, re.findall(r"\d+", text))) != row["numbers"]:
        return False
    return value_of(text) == row["target"]


def value_of(expression: str) -> int:
    """Return the value of numbers that are joined by +, - and *.

    >>> value_of("3 * 5 + 8 - 2 * 4")
    15
    """
    total, sign, product = 0, 1, 1
    operator = "*"
    for item in expression.split():
        if item in "+-*":
            operator = item
            continue
        if operator == "*":
            product *= int(item)
        else:
            total += sign * product
            sign, product = (1 if operator == "+" else -1), int(item)
    return total + sign * product


def _is_right_call(row: Json, answer: Json) -> bool:
    calls: list[Json] = answer.get("tool_calls") or []
    if len(calls) != 1 or calls[0]["function"]["name"] != row["name"]:
        return False
    try:
        arguments = json.loads(calls[0]["function"]["arguments"])
    except ValueError:
        return False
    return arguments == row["arguments"]


def _text(answer: Json) -> str:
    return (answer.get("content") or "").strip()


CHECKS: dict[str, Callable[[Json, Json], bool]] = {
    "sums": _is_right_sum,
    "countdown": _is_right_expression,
    "tools": _is_right_call,
}
