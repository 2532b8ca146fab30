"""The section `[release]` of fakevllm.toml. The settings decide three things: which versions of the
weights answer apps, which rows are held out of training, and when a version is released or
rejected. Versions are compared by their answers to the held-out rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fakevllm.config.base import Section


def _checked_range(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError("write two finite numbers, the smaller number first, such as [0, 1]")
    return ends


class ReleaseSection(Section):
    """The section `[release]`. The settings say which versions of the weights answer apps, and how
    a version is evaluated before it may be released."""

    mode: Literal["continuous", "gated"] = "continuous"
    """Which weights answer apps. `continuous`: the newest weights answer all sessions. `gated`: the
    newest weights answer the share `canary_share` of the sessions, and only these sessions are
    trained. All other sessions are answered by the released version, which passed its evaluation on
    held-out rows."""
    evaluation: Literal["beside_training", "between_steps"] = "beside_training"
    """When versions are evaluated. The setting applies only to the mode `gated`.

    * `beside_training`: versions are evaluated while training goes on. The engine must be able to
      hold several versions.
    * `between_steps`: training waits while a version is evaluated. This works with every engine.
      The newest version answers all sessions, and all sessions are trained.
    """
    canary_share: float = Field(default=0.2, gt=0, le=1, allow_inf_nan=False)
    """With the mode `gated`: share of the sessions that the newest version answers."""
    eval_dataset: Path | None = None
    """JSON Lines file with held-out rows. Requests that quote a held-out row are never trained. The
    text of a row is in the field that `dataset.field` names.
    """
    baseline_share: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Share of the sessions that the version `baseline_version` answers. These sessions are not
    trained. This share must be below 1, in the mode `gated` together with `canary_share`."""
    baseline_version: int = Field(default=0, ge=0)
    """Version of the weights that answers the sessions of the baseline; 0 is the model before any
    training. Any other version must have a checkpoint."""
    reward_range: Annotated[tuple[float, float], AfterValidator(_checked_range)] = (0.0, 1.0)
    """Smallest and largest reward that the hook can return. The width of confidence intervals
    depends on this range."""
    eval_samples: int = Field(default=4, ge=1, le=64)
    """Number of answers that each version samples for a held-out row, in addition to one greedy
    answer.
    """
    evaluate_every: int = Field(default=20, ge=1)
    """Minimum number of training steps between two versions that are evaluated. The newest version
    is evaluated as soon as it is this number of steps newer than the version that was evaluated
    last.
    """
    margin: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    """Maximum acceptable loss: a version may be released if its mean reward is lower than that of
    the released version by at most this number."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5, allow_inf_nan=False)
    """Upper bound of the probability of a wrong rejection: a version is rejected although it loses
    no more than `margin`. Half of this number is the upper bound of the probability of a wrong
    release: a version is released although it loses more than `margin`."""
    max_samples: int = Field(default=2000, ge=1)
    """Maximum number of samples of a version in its evaluation. If this number of samples leads to
    no decision, the version is undecided, and the released version stays released.
    """

    @property
    def is_gated(self) -> bool:
        return self.mode == "gated"

    @property
    def is_between_steps(self) -> bool:
        """True if the section sets the mode `gated` and the evaluation `between_steps`. Training
        then waits whenever a version of the weights is evaluated."""
        return self.is_gated and self.evaluation == "between_steps"

    @property
    def has_released_arm(self) -> bool:
        """True if, by these settings, the released version of the weights answers some sessions,
        and the newest version answers other sessions."""
        return self.is_gated and not self.is_between_steps

    @property
    def shares(self) -> dict[str, float]:
        """The settings that give a share of the sessions to one version of the weights. The keys
        are the names of these settings, such as `baseline_share`. The values are the shares."""
        canary = {"canary_share": self.canary_share} if self.has_released_arm else {}
        return canary | {"baseline_share": self.baseline_share}

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if sum(self.shares.values()) >= 1:
            named = " + ".join(f"{key} = {share:g}" for key, share in self.shares.items())
            raise ValueError(
                f"{named} leaves no session for the other arms: shares must add up to less than 1"
            )
        return self

    @model_validator(mode="after")
    def _check_gate(self) -> Self:
        if not self.is_gated:
            return self
        if self.is_between_steps and "canary_share" in self.model_fields_set:
            raise ValueError(
                'canary_share has no effect with evaluation = "between_steps", where the newest '
                "version answers all sessions: take it out"
            )
        if self.eval_dataset is None:
            raise ValueError(
                'the mode "gated" evaluates versions on held-out rows: name their file in '
                "eval_dataset"
            )
        low, high = self.reward_range
        if self.margin >= high - low:
            raise ValueError(
                f"margin {self.margin:g} is as large as all of reward_range, from {low:g} to "
                f"{high:g}: write a smaller margin"
            )
        if self.max_samples < self.eval_samples:
            raise ValueError(
                f"max_samples {self.max_samples} is less than the {self.eval_samples} samples of "
                "one row: write a larger number"
            )
        return self
