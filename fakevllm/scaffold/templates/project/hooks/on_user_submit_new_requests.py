"""Choose how many answers are sampled for a request. A long question takes more compute, so it gets
fewer answers. Other questions get the configured number (`num_repeat`)."""

from __future__ import annotations

from fakevllm.hooks.spec import Task

LONG_QUESTION_CHARS = 2000
NUM_FOR_LONG_QUESTIONS = 4


def on_user_submit_new_requests(request_id: str, task: Task) -> int | None:
    """Return the number of answers, or None to keep the configured number."""
    return NUM_FOR_LONG_QUESTIONS if len(task.main_query) > LONG_QUESTION_CHARS else None
