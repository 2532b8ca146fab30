"""Called before each request is sampled: how many siblings, and what may differ between them."""


def on_user_submit_new_requests(request_id, task):
    return None  # keep the configured number, change nothing
