"""The longest time that a reload of hooks may take, without pydantic, so that small commands start
quickly."""

MAX_TRIAL_S = 3600.0
"""Maximum of `hooks.reload.max_s`. `fakevllm hooks reload` waits a little longer for its answer."""
