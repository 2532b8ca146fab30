"""Settings of the `[reward]` section."""

from __future__ import annotations

from pydantic import Field

from fakevllm.config.base import Section


class RewardSection(Section):
    failure_floor: float | None = Field(default=None, allow_inf_nan=False)
    """The most that a sibling gets whose answer failed by the model's own fault, whatever the hook
    says; never more than the worst of the others. None: what the hook says."""
