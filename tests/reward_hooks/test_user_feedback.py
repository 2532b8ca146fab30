"""user_feedback: what users say counts, and their silence does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakevllm.hooks.outcomes import FeedbackValue
from fakevllm.hooks.spec import Feedback
from fakevllm.hooks.worker import HookWorker
from reward_hooks import user_feedback

FILE = Path(user_feedback.__file__)


@pytest.mark.parametrize(
    ("told", "value"),
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
def test_what_users_do_counts_for(told: dict[str, Any], value: float | None) -> None:
    given: dict[str, Any] = {"kind": "feedback", "request_id": "g"}
    given |= {"answer": {"content": "It is 8."}, **told}
    assert user_feedback.on_feedback(Feedback(**given)) == value


async def test_it_runs_as_a_hook_and_prefers_none_of_the_answers() -> None:
    answers: list[dict[str, Any]] = [
        {"content": text, "finish_reason": "stop"} for text in ("a", "b")
    ]
    assert user_feedback.on_compute_relative_reward([], answers, "q") == [0.0, 0.0]
    worker = HookWorker(FILE, 20.0)
    await worker.start()
    try:
        said = Feedback(kind="feedback", request_id="g", answer=answers[0], thumbs="up")
        assert await worker.feedback(said) == FeedbackValue(1.0, worker.info.content_hash)
    finally:
        await worker.close()
