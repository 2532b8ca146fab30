"""The section `[hooks.reload]` of fakevllm.toml."""

from __future__ import annotations

from pydantic import Field

from fakevllm.config.base import Section
from fakevllm.config.reload_limit import MAX_TRIAL_S


class ReloadSection(Section):
    """Settings for the trial of new hooks on groups in the ledger (the proxy's database). The
    section also has the limits within which the new hooks replace the old ones. A group is a
    request with the answers that were sampled for it."""

    groups: int = Field(default=50, ge=0, le=1000)
    """Number of logged groups on which new hooks are tried. The newest groups are used. 0 means
    that there is no trial.
    """
    max_s: float = Field(default=60.0, gt=0, le=MAX_TRIAL_S)
    """Seconds that loading and trying the new hooks may take."""
    max_failed: float = Field(default=0.0, ge=0, le=1)
    """Maximum share of the groups for which the new hooks may fail."""
    max_lost_signal: float = Field(default=0.9, ge=0, le=1)
    """Maximum share of groups that may lose their signal with the new hooks. A group has a signal
    if two of its rewards differ. A group without a signal trains nothing.
    """
