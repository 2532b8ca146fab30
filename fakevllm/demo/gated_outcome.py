"""Compute the results that only a demo with the mode `gated` has. In this mode, versions of the
weights are evaluated before they are released. The demo may have planted steps, which train with
inverted rewards and so make the weights worse. For such a demo, the module checks claims, for
example that no bad version was released. This module does no I/O."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fakevllm.demo.gate_settings import MARGIN, NUM_PLANTED, PlantedSteps
from fakevllm.demo.release_watch import PlantedTimes
from fakevllm.release.arm_gains import ArmGains, Gain, GroupOutcome
from fakevllm.release.arms import Arm
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm_adapters.protocol.releases import Decision, ReleasesReply

NUM_COMPARED = 100
"""Maximum number of sessions before the planted steps, and of sessions after training went back,
that take part in a comparison. The sessions between these two periods all take part. Earlier
sessions were answered by versions that had learnt less, and later sessions by versions that had
learnt more."""
NUM_BAD = 5
"""Minimum number of planted steps after which a version counts as bad. After fewer planted steps,
the version may still be better than the released version, because the released version is older."""
MIN_RELEASED_PROBE = 0.85
"""Share of right answers that the released version must reach in the probe of a planted run."""
Z_95 = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class ArmChange:
    """Two mean rewards of the released arm (the sessions that the released version answers): before
    the planted steps, and since the planted steps began. Planted steps train with inverted rewards.
    """

    before: float
    since: float
    difference: float
    """`since` minus `before`."""
    low: float
    """Low end of the difference's 95 % confidence interval, which is valid for a single look at the
    data."""
    high: float
    num_before: int
    num_since: int


@dataclass(frozen=True, slots=True)
class PlantedOutcome:
    """The results of the planted steps (steps that trained with inverted rewards)."""

    first_step: int
    versions: tuple[int, int]
    """First and last version with which a planted step may begin."""
    released_arm: ArmChange | None
    """Change of the released arm's mean reward. None if the arm had fewer than two sessions before
    the planted steps, or fewer than two sessions since then."""
    rejected: int | None
    """First version whose rejection made training go back after the planted steps had begun; None
    if training did not go back."""
    restored: int | None
    """Version to which training went back after this rejection; None if training did not go back.
    """
    sessions_until_return: int | None
    """Number of sessions, of all arms, from the first planted step until training went back."""
    claims: dict[str, bool]
    """For each claim about the planted steps, whether the claim holds."""


@dataclass(frozen=True, slots=True)
class GatedOutcome:
    """The additional results of a demo in which versions are evaluated before their release."""

    released: int
    """Version that answers the app at the end."""
    after_released: float
    """Share of right answers of the released version in the probe after training."""
    margin: float
    policy_gain: Gain | None
    """Mean reward of the newest versions minus the mean reward of version 0, with a confidence
    interval."""
    choice_gain: Gain | None
    """Mean reward of the served answers minus the mean reward of all siblings, with a confidence
    interval."""
    releases: list[dict[str, Any]]
    """All decisions about versions, oldest first."""
    planted: PlantedOutcome | None = None


def gated_outcome(
    history: ReleasesReply,
    groups: Sequence[GroupOutcome],
    after_released: float,
    planted: PlantedSteps | None,
    times: PlantedTimes,
) -> GatedOutcome:
    """Return the additional results of a demo in the mode `gated`. `groups` are the scored groups
    (requests with their answers) of all sessions, in the order of their arrival."""
    gains = ArmGains(RewardRange(0.0, 1.0))
    gains.add_all(groups)
    summary = gains.summary(math.inf)  # no session of the demo goes on after its end
    return GatedOutcome(
        released=history.released,
        after_released=after_released,
        margin=MARGIN,
        policy_gain=summary.policy,
        choice_gain=summary.choice,
        releases=[record.model_dump(mode="json") for record in history.records],
        planted=None
        if planted is None
        else _planted_outcome(planted, times, history, groups, after_released),
    )


def _planted_outcome(
    planted: PlantedSteps,
    times: PlantedTimes,
    history: ReleasesReply,
    groups: Sequence[GroupOutcome],
    after_released: float,
) -> PlantedOutcome:
    began_at = math.inf if times.began_at is None else times.began_at
    returns = [
        record
        for record in history.records
        if record.decision is Decision.REJECTED
        and record.time_s >= began_at
        and "restored" in record.evidence
    ]
    first = returns[0] if returns else None
    change = arm_change(groups, began_at, math.inf if first is None else first.time_s)
    bad_versions = range(planted.begins_at + NUM_BAD, planted.ends_at + 1)
    released_bad = [
        record.version
        for record in history.records
        if record.decision is Decision.RELEASED and record.version in bad_versions
    ]
    claims = {
        "the released arm's answers did not fall": change is not None
        and change.difference > -MARGIN,
        f"no version after {NUM_BAD} to {NUM_PLANTED} planted steps was released": not released_bad,
        "training went back": first is not None,
        f"the released version's probe is at least {MIN_RELEASED_PROBE}": after_released
        >= MIN_RELEASED_PROBE,
    }
    return PlantedOutcome(
        first_step=planted.first_step,
        versions=(planted.begins_at, planted.ends_at - 1),
        released_arm=change,
        rejected=None if first is None else first.version,
        restored=None if first is None else first.evidence["restored"],
        sessions_until_return=None
        if first is None
        else len({one.root for one in groups if began_at <= one.received_at < first.time_s}),
        claims=claims,
    )


def arm_change(
    groups: Sequence[GroupOutcome], began_at: float, returned_at: float = math.inf
) -> ArmChange | None:
    """Compare the mean reward of the released arm before and after the planted steps began. The
    released arm is the set of sessions that the released version answers. Planted steps train with
    inverted rewards.

    `began_at` is the Unix time at which the planted steps began. `returned_at` is the Unix time at
    which training went back to an earlier version. Sessions long after `returned_at` are left out.
    Return None if there are too few sessions.
    """
    released = [group for group in groups if group.arm is Arm.RELEASED]
    before = [group.mean for group in released if group.received_at < began_at][-NUM_COMPARED:]
    num_until_return = sum(began_at <= group.received_at < returned_at for group in released)
    since = [group.mean for group in released if group.received_at >= began_at]
    since = since[: num_until_return + NUM_COMPARED]
    if len(before) < 2 or len(since) < 2:
        return None
    means = statistics.fmean(before), statistics.fmean(since)
    variance = sum(statistics.variance(part) / len(part) for part in (before, since))
    half = Z_95 * math.sqrt(variance)
    difference = means[1] - means[0]
    return ArmChange(
        *means, difference, difference - half, difference + half, len(before), len(since)
    )
