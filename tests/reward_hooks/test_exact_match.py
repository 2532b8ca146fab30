"""The hook exact_match: answers are compared with the task's reference."""

from __future__ import annotations

from typing import Any

import pytest

from fakevllm.hooks.spec import Sibling, Task
from reward_hooks import exact_match


def rewards(reference: object, *contents: str | None, finish: str = "stop") -> list[float | None]:
    task = Task(metadata={} if reference is None else {"answer": reference})
    answers: list[dict[str, Any]] = [
        {"role": "assistant", "content": content, "finish_reason": finish} for content in contents
    ]
    siblings = [Sibling(i, task, f"g/{i}", finish) for i in range(len(answers))]
    return exact_match.on_compute_relative_reward(siblings, answers, "q")


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        ("The answer is 42", 1.0),
        ("Answer: 42.", 1.0),
        ("answer = 42.0", 1.0),
        ("#### 42", 1.0),
        (r"so \boxed{42}", 1.0),
        ("Answer: 41. No, wait.\nAnswer: 42", 1.0),
        ("Answer: 42\nNo. Answer: 43", 0.0),
        ("42", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_the_last_match_is_compared_with_the_reference(content: str | None, reward: float) -> None:
    assert rewards(42, content) == [reward]


def test_numbers_compare_by_value_and_words_without_case() -> None:
    assert rewards("1200", "Answer: $1,200.00") == [1.0]
    assert rewards("Paris", "Answer: **paris**.", "Answer: Rome") == [1.0, 0.0]


def test_answers_without_a_reference_are_not_trained() -> None:
    assert rewards(None, "Answer: 42") == [None]


@pytest.mark.parametrize("finish", ["length", "tool_calls"])
def test_an_unfinished_answer_is_wrong(finish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rewards(42, "Answer: 42", finish=finish) == [0.0]
    monkeypatch.setattr(exact_match, "MUST_FINISH", False)
    assert rewards(42, "Answer: 42", finish=finish) == [1.0]


def test_the_answer_may_be_a_json_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_match, "JSON_FIELD", "result")
    contents = ('{"result": 42}', '```json\n{"result": "42"}\n```', '{"result": null}', "no", "{[}")
    assert rewards(42, *contents) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_without_a_pattern_the_whole_text_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_match, "PATTERN", None)
    assert rewards("Yes", " yes. ", "yes and no") == [1.0, 0.0]


def test_the_extracted_answer_is_an_annotation() -> None:
    answer: dict[str, Any] = {"content": "Answer: 41", "finish_reason": "stop"}
    sibling = Sibling(0, Task(metadata={"answer": 42}), "g/0", "stop")
    exact_match.on_compute_relative_reward([sibling], [answer], "q")
    assert answer["extracted"] == "41"
