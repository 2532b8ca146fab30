"""The demo's hook for new requests. A hook of this name can choose the number of answers to sample
for a request. The demo's hook keeps the configured number."""

from fakevllm.hooks.spec import Task


def on_user_submit_new_requests(request_id: str, task: Task) -> int | None:
    return None  # keep the configured number, change nothing
