"""The sections `[guard]` and `[alerts]` of fakevllm.toml: what the proxy does when training goes
wrong, and to which address it sends alarms."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fakevllm.config.base import Section
from fakevllm.config.http_address import checked_http_url

GuardAction = Literal["off", "warn", "hold", "rollback"]


class GuardThresholds(Section):
    """The section `[guard.thresholds]`: the value at which each detector raises its alarm."""

    entropy_collapse: float = Field(default=0.1, gt=0, lt=1)
    """Entropy of the tokens, as a fraction of that in the first steps. An alarm is raised at this
    fraction or below it."""
    length_growth: float = Field(default=1.5, gt=1, allow_inf_nan=False)
    """Mean length of the answers, divided by that in the first steps. An alarm is raised at this
    ratio or above it, if the mean reward has risen too."""
    identical_siblings: float = Field(default=0.3, gt=0, le=1)
    """Rise of the share of nearly identical pairs among the siblings of a request."""
    equal_answers: float = Field(default=0.2, gt=0, le=1)
    """Rise of the share of answers that another question got too, word for word."""
    refusals: float = Field(default=0.2, gt=0, le=1)
    """Rise of the share of answers that refuse, or that ask the user to be clearer."""
    tool_errors: float = Field(default=0.1, gt=0, le=1)
    """Rise of the share of broken tool calls among the answers that call a tool."""
    second_judge: float = Field(default=0.5, gt=0, lt=1)
    """Share of the pairs of siblings that the second judge puts in the same order as the reward. An
    alarm is raised at this share or below it."""
    held_out_gap: float = Field(default=0.1, gt=0, le=1)
    """Rise of the mean training reward minus the rise of the mean reward on held-out rows, as a
    share of the width of `release.reward_range`."""


class GuardSection(Section):
    """The section `[guard]`: what the proxy does when a detector sees training go wrong.

    Each detector has an action. `off`: the detector does not run. `warn`: the alarm is in the log,
    in `fakevllm status`, in the console, in the metrics, and is sent to `alerts.url`. `hold`: in
    addition, no version is released until `fakevllm release resume`; with the release mode
    `continuous`, training is paused until `fakevllm resume`. `rollback`: in addition, training goes
    back to the released version, as with `fakevllm release rollback`.
    """

    entropy_collapse: GuardAction = "warn"
    """Action if the entropy of the tokens falls to a small fraction of that in the first steps."""
    length_growth: GuardAction = "warn"
    """Action if answers grow longer while rewards rise."""
    identical_siblings: GuardAction = "warn"
    """Action if the siblings of a request become nearly identical."""
    equal_answers: GuardAction = "warn"
    """Action if different questions get equal answers."""
    refusals: GuardAction = "warn"
    """Action if more answers refuse, or ask the user to be clearer. Only English is recognised."""
    tool_errors: GuardAction = "warn"
    """Action if more tool calls are broken."""
    second_judge: GuardAction = "warn"
    """Action if a second judge disagrees with the rewards. The detector needs
    `second_judge_annotation`."""
    held_out_gap: GuardAction = "warn"
    """Action if training rewards rise, and rewards on held-out rows do not. The detector needs
    evaluations: the release mode `gated`, or `fakevllm eval`."""
    second_judge_annotation: str | None = None
    """Key that the hook adds to each answer, with the score of a second judge as a number. None
    means that there is no second judge."""
    baseline_steps: int = Field(default=20, ge=2, le=1000)
    """Number of first steps with which later steps are compared. They are counted from the start of
    the run, and again after each change of the hooks or of the job."""
    window_steps: int = Field(default=10, ge=2, le=1000)
    """Number of latest steps that are compared with the first ones."""
    thresholds: GuardThresholds = GuardThresholds()
    """The values at which alarms are raised."""

    @property
    def actions(self) -> dict[str, GuardAction]:
        """The action of each detector, by the detector's name."""
        return {name: getattr(self, name) for name in GuardThresholds.model_fields}

    def with_action(self, *actions: GuardAction) -> list[str]:
        """Return the names of the detectors that have one of these actions."""
        return [name for name, action in self.actions.items() if action in actions]

    @model_validator(mode="after")
    def _check_second_judge(self) -> Self:
        if self.second_judge_annotation is None and self.second_judge in ("hold", "rollback"):
            raise ValueError(
                f'second_judge = "{self.second_judge}" needs the scores of a second judge: name '
                "the key that your hook adds to each answer in second_judge_annotation"
            )
        return self


class AlertsSection(Section):
    """The section `[alerts]`: the webhook that gets the alarms of the guard."""

    url: Annotated[str, AfterValidator(checked_http_url)] | None = None
    """Address to which alarms are sent as JSON, such as an incoming webhook of Slack. The
    environment variable `FAKEVLLM_ALERTS_SECRET` has the secret with which they are signed. None
    means that alarms are not sent."""
