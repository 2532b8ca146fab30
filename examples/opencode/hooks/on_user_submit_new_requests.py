"""Number of siblings: the configured number for every request."""

from __future__ import annotations

from typing import Any


def on_user_submit_new_requests(request_id: str, task: Any) -> int | None:
    return None
