"""The sections `[reward]` and `[feedback]` of fakevllm.toml. These sections control how a reward is
changed after the reward hook (the user's function) has computed it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fakevllm.config.base import Section

MAX_WINDOW_S = 1800.0
"""Maximum of `feedback.window_s` in seconds. The swarm server drops a group (a request with its
sampled answers) if it gets no rewards for one hour. The proxy sends the rewards after the feedback
window, so the window must be shorter than one hour."""
BASELINE_WINDOW = 200
"""Maximum number of feedback values from which the baseline of new feedback is computed. The
baseline is the mean of the latest feedback values with the same API key."""


class RewardSection(Section):
    """The section `[reward]`: changes of rewards after the reward hook (the user's function) has
    scored the answers."""

    failure_floor: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of a sibling (a sampled answer) that is unusable because of the model itself, for
    example because the token limit cut it off. This reward replaces the hook's score. If the lowest
    reward of the usable siblings is below `failure_floor`, the unusable sibling gets this lowest
    reward instead. None means that the hook's score is used unchanged."""


class FeedbackSection(Section):
    """The section `[feedback]`: how user feedback changes rewards and becomes training samples."""

    window_s: float = Field(default=0.0, ge=0, le=MAX_WINDOW_S, allow_inf_nan=False)
    """Seconds for which a scored group (a request with its sampled answers) waits for feedback on
    the served answer, before the group is sent to the server. 0 means that groups do not wait."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor for the value of feedback. Feedback during the waiting time adds weight * value to the
    reward of the served answer. Later feedback becomes a training sample of its own, with the
    advantage weight * (value - baseline)."""
    num_for_baseline: int = Field(default=8, ge=2, le=BASELINE_WINDOW)
    """Number of feedback values that an API key must have before feedback of this key is trained as
    a sample of its own. The baseline of such a sample is the mean of the key's other values."""
    edits: Literal["keep", "sft", "dpo"] = "keep"
    """How corrected texts of users are used. `keep`: they are stored. `sft`: the model also
    imitates them. `dpo`: the model also learns to prefer them to its own answers. For `sft` and
    `dpo`, `job.loss` or `job.demonstration_loss` must have the same value."""
