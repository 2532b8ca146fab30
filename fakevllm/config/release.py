"""The section `[release]` of fakevllm.toml. It names the rows that are held out of training, so
that versions of the weights can be measured with them, and the share of sessions that a fixed
version answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from fakevllm.config.base import Section


def _checked_range(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError("write two finite numbers, the smaller number first, such as [0, 1]")
    return ends


class ReleaseSection(Section):
    """The section `[release]`: rows that are held out of training, and the baseline."""

    eval_dataset: Path | None = None
    """JSON Lines file with held-out rows. Requests that quote one of its rows are never trained.
    The text of a row is in the field that `dataset.field` names."""
    baseline_share: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Share of the sessions that the version `baseline_version` answers. They are not trained."""
    baseline_version: int = Field(default=0, ge=0)
    """Version of the weights that answers the sessions of the baseline; 0 is the model before any
    training."""
    reward_range: Annotated[tuple[float, float], AfterValidator(_checked_range)] = (0.0, 1.0)
    """Smallest and largest reward that the hook can return. The width of intervals depends on
    it."""

    @property
    def shares(self) -> dict[str, float]:
        """The configured shares of sessions, by key."""
        return {"baseline_share": self.baseline_share}

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if sum(self.shares.values()) >= 1:
            named = " + ".join(f"{key} = {share:g}" for key, share in self.shares.items())
            raise ValueError(
                f"{named} leaves no session for the other arms: shares must add up to less than 1"
            )
        return self
