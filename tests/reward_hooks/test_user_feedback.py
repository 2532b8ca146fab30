"""The hook user_feedback: feedback has a value, and missing feedback has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.results import FeedbackValue
from fakevllm.hooks.spec import Feedback
from reward_hooks import user_feedback

FILE = Path(user_feedback.__file__)


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"thumbs": "up"}, 1.0),
        ({"thumbs": "down", "score": 0.2}, 0.2),
        ({"comment": "fine"}, None),
        ({"edited": "It is 7."}, -0.5),
        ({"kind": "regenerate"}, -0.5),
        ({"kind": "next_message", "next_message": "Thank you!"}, 0.5),
        ({"kind": "next_message", "next_message": "That's wrong."}, -0.5),
        ({"kind": "next_message", "next_message": "And 2 plus 2?"}, None),
    ],
)
def test_each_kind_of_feedback_has_its_value(fields: dict[str, Any], value: float | None) -> None:
    defaults: dict[str, Any] = {
        "kind": "feedback",
        "request_id": "g",
        "answer": {"content": "It is 8."},
    }
    assert user_feedback.on_feedback(Feedback(**defaults | fields)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Greatest common divisor of 8 and 12?", None),
        ("Perfect squares below 100?", None),
        ("Great Britain's capital?", None),
        ("Thanksgiving: when is it?", None),
        ("Thank you, and what is 2 plus 2?", 0.5),
        ("thanks", 0.5),
        ("Perfect!", 0.5),
        ("That works. Next: 3 plus 3", 0.5),
        ("Great, but that's wrong", -0.5),
        ("No, it is fine, go on", None),
        ("no, thanks", None),
        ("No. It is 7.", -0.5),
        ("That\u2019s wrong.", -0.5),
        ("Not what I asked for", -0.5),
        ("", None),
    ],
)
def test_a_next_message_is_judged_by_whole_words_of_its_first_sentence(
    text: str, value: float | None
) -> None:
    assert user_feedback.value_of_next_message(text) == value


async def test_the_hook_runs_in_a_worker_and_gives_all_answers_the_same_reward() -> None:
    answers: list[dict[str, Any]] = [
        {"content": text, "finish_reason": "stop"} for text in ("a", "b")
    ]
    assert user_feedback.on_compute_relative_reward([], answers, "q") == [0.0, 0.0]
    worker = HookWorker(FILE, 20.0)
    await worker.start()
    try:
        thumbs_up = Feedback(kind="feedback", request_id="g", answer=answers[0], thumbs="up")
        assert await worker.feedback(thumbs_up) == FeedbackValue(1.0, worker.info.content_hash)
    finally:
        await worker.close()
