"""Number of siblings: four for a long question, which takes more compute, else the configured
number."""

from __future__ import annotations

from typing import Any

LONG_QUESTION_CHARS = 500


def on_user_submit_new_requests(request_id: str, task: Any) -> int | None:
    return 4 if len(task.main_query) > LONG_QUESTION_CHARS else None
