"""Every step of the agent gets the configured number of siblings."""

from __future__ import annotations

from typing import Any


def on_user_submit_new_requests(request_id: str, task: Any) -> int | None:
    return None
