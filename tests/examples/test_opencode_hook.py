"""The reward hook of the opencode example scores the file that an answer would write."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from examples.opencode.hooks.on_compute_relative_reward import on_compute_relative_reward

QUESTION = "What is 3 plus 4? Write the number to sum.txt"


def write(content: str, file: str = "sum.txt", name: str = "write") -> dict[str, Any]:
    arguments = json.dumps({"content": content, "filePath": f"/somewhere/{file}"})
    call = {"function": {"name": name, "arguments": arguments}}
    return {"content": "", "finish_reason": "tool_calls", "tool_calls": [call]}


def closing_message(text: str | None, finish_reason: str = "stop") -> dict[str, Any]:
    return {"content": text, "finish_reason": finish_reason}


def rewards(*answers: dict[str, Any], before: list[dict[str, Any]]) -> list[float | None]:
    siblings = [SimpleNamespace(messages=before) for _ in answers]
    return on_compute_relative_reward(siblings, list(answers), f'"{QUESTION}"')


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (write("7"), 1),
        (write("8"), 0),
        (write("7", "total.txt"), 0),
        (write("7", name="edit"), 0),
        (closing_message("Done."), 0),
    ],
)
def test_a_first_answer_is_rewarded_if_the_file_would_be_right(
    answer: dict[str, Any], reward: float
) -> None:
    assert rewards(answer, before=[]) == [reward]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (closing_message("Done."), 1),
        (closing_message("Done.", "length"), 0),
        (closing_message(""), 0),
        (closing_message(None), 0),
        (closing_message('<tool_call>\n{"name": "write"'), 0),
        (closing_message('Done.txt"}}'), 0),
        (write("7"), 0),
    ],
)
def test_once_the_file_is_right_only_a_plain_closing_message_is_rewarded(
    answer: dict[str, Any], reward: float
) -> None:
    assert rewards(answer, before=[write("7")]) == [reward]


def test_a_wrong_file_must_be_corrected_by_a_call() -> None:
    assert rewards(write("7"), closing_message("Done."), before=[write("8")]) == [1, 0]


def test_arguments_that_are_not_json_write_nothing() -> None:
    broken = write("7")
    broken["tool_calls"][0]["function"]["arguments"] = '{"content": "7"'
    assert rewards(broken, before=[]) == [0]


def test_a_question_outside_the_dataset_is_served_and_not_trained() -> None:
    assert on_compute_relative_reward(
        [SimpleNamespace(messages=[])], [closing_message("hi")], "hi"
    ) == [None]
