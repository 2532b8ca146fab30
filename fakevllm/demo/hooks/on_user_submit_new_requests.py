"""The demo's hook for new requests. The hook returns the number of siblings to sample."""

from fakevllm.hooks.spec import Task


def on_user_submit_new_requests(request_id: str, task: Task) -> int | None:
    return None  # keep the configured number, change nothing
