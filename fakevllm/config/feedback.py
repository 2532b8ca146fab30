"""Settings of the `[feedback]` section."""

from __future__ import annotations

from pydantic import Field

from fakevllm.config.base import Section

MAX_WINDOW_S = 1800.0
"""The server forgets a group whose end does not come within the hour."""
BASELINE_OVER = 200
"""Latest feedbacks of an app whose mean is what a new one is measured by."""


class FeedbackSection(Section):
    window_s: float = Field(default=0.0, ge=0, le=MAX_WINDOW_S, allow_inf_nan=False)
    """How long a scored group waits for what is said of its answer."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """What a feedback of 1 adds to the reward, or to the advantage of a sample."""
    num_for_baseline: int = Field(default=8, ge=2, le=BASELINE_OVER)
    """Feedbacks of one app, before any is trained by itself."""
