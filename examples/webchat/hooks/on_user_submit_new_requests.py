"""Short questions are cheap and get all siblings; a long chat is dear, and gets fewer."""

from __future__ import annotations

from typing import Any

LONG = 500  # characters


def on_user_submit_new_requests(request_id: str, task: Any) -> int | None:
    return 4 if len(task.main_query) > LONG else None
