"""The sections `[reward]` and `[feedback]` of fakevllm.toml. They control how a reward changes
after the reward hook has computed it."""

from __future__ import annotations

from pydantic import Field

from fakevllm.config.base import Section

MAX_WINDOW_S = 1800.0
"""Maximum feedback window in seconds. It stays below the hour after which the server drops a group
whose end has not arrived."""
BASELINE_WINDOW = 200
"""Number of an API key's latest feedbacks whose mean is the baseline of a new feedback."""


class RewardSection(Section):
    """The section `[reward]`: changes of rewards after the reward hook (the user's function) has
    scored the answers."""

    failure_floor: float | None = Field(default=None, allow_inf_nan=False)
    """Maximum reward of a sibling whose answer failed because of the model, whatever the hook's
    score is. The reward of such a sibling is also never above the lowest reward of the other
    siblings. None means that the hook's score is used unchanged."""


class FeedbackSection(Section):
    """The section `[feedback]`: how user feedback changes rewards and becomes training samples."""

    window_s: float = Field(default=0.0, ge=0, le=MAX_WINDOW_S, allow_inf_nan=False)
    """Seconds for which a scored group waits for feedback on its answer; 0 means no waiting."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Amount that a feedback of 1 adds to the reward, or to the advantage of a late sample."""
    num_for_baseline: int = Field(default=8, ge=2, le=BASELINE_WINDOW)
    """Number of feedbacks that an API key must have before any of them is trained as a sample."""
