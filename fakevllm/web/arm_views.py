"""The statistics about arms, as `/fakevllm/stats` and `/metrics` show them. An arm is a set of
sessions that one version of the weights answers. A gain is a difference of mean rewards."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from fakevllm.groups.request_arms import RequestArms
from fakevllm.metrics import Metrics
from fakevllm.release.arm_gains import Gain
from fakevllm.release.arms import Arm


class GainStats(BaseModel):
    """A gain (a difference of mean rewards), with its confidence interval."""

    mean: float
    low: float | None
    """Low end of the interval. None if a reward was outside of `release.reward_range`."""
    high: float | None
    num: int
    """Number of observations. For the field `policy_gain` of ArmStats, an observation is a pair of
    sessions. For the field `choice_gain`, an observation is one session."""


class ArmStats(BaseModel):
    """The number of sessions and the mean reward of each arm, and two gains. An arm is a set of
    sessions that one version of the weights answers. `policy_gain` is the gain by training.
    `choice_gain` is the gain by choosing the best sibling (sampled answer)."""

    sessions: dict[str, int]
    """Number of counted sessions by arm. A session is counted ten minutes after its last group."""
    means: dict[str, float]
    """Mean reward by arm, over the counted sessions."""
    open_sessions: int
    """Number of sessions that are not counted yet."""
    policy_gain: GainStats | None
    """Mean reward of the training arm minus the mean reward of the baseline arm."""
    choice_gain: GainStats | None
    """Mean reward of the served siblings minus the mean reward of all siblings, in the training
    arm."""
    reward_outside: float | None = None
    """A reward outside of `release.reward_range`; None if there was none."""
    trouble: dict[str, str] = {}
    """Reason why the version of an arm cannot be sampled, by arm."""


def arm_stats(arms: RequestArms) -> ArmStats:
    """Return the statistics of the arms, which the proxy keeps in memory. An arm is a set of
    sessions that one version of the weights answers."""
    summary = arms.summary()
    troubles = {arm.value: arms.policies.trouble(arm) for arm in Arm}
    return ArmStats(
        sessions={arm.value: num for arm, num in summary.sessions.items()},
        means={arm.value: mean for arm, mean in summary.means.items()},
        open_sessions=summary.num_open,
        policy_gain=_gain(summary.policy),
        choice_gain=_gain(summary.choice),
        reward_outside=summary.outside,
        trouble={arm: trouble for arm, trouble in troubles.items() if trouble is not None},
    )


def add_arm_gauges(metrics: Metrics, arms: RequestArms) -> None:
    """Add gauges to the metrics: the number of sessions and the mean reward of each arm, the gain
    by training, and the gain by choosing the best sibling (sampled answer).

    An arm is a set of sessions that one version of the weights answers. A gain is a difference of
    mean rewards.
    """
    metrics.labelled_gauge(
        "fakevllm_arm_sessions",
        "Sessions that were counted in the gains, by their arm.",
        "arm",
        lambda: {arm.value: num for arm, num in arms.summary().sessions.items()},
    )
    metrics.labelled_gauge(
        "fakevllm_arm_reward",
        "Mean reward of the counted sessions, by their arm.",
        "arm",
        lambda: {arm.value: mean for arm, mean in arms.summary().means.items()},
    )
    metrics.labelled_gauge(
        "fakevllm_policy_gain",
        "Mean reward of the training arm minus that of the baseline, and its interval.",
        "bound",
        lambda: _bounds(arms.summary().policy),
    )
    metrics.labelled_gauge(
        "fakevllm_choice_gain",
        "Reward of served siblings minus the mean of all, in the training arm, and its interval.",
        "bound",
        lambda: _bounds(arms.summary().choice),
    )


def _gain(gain: Gain | None) -> GainStats | None:
    return None if gain is None else GainStats.model_validate(gain, from_attributes=True)


def _bounds(gain: Gain | None) -> Mapping[str, float]:
    if gain is None:
        return {}
    bounds = {"low": gain.low, "mean": gain.mean, "high": gain.high}
    return {name: value for name, value in bounds.items() if value is not None}
