"""The table of the detectors. A detector compares the latest values of some figures with the first
ones, or with a fixed value.

The thresholds are settings, with their defaults in `config/guard`. docs/guard.md has the source of
each threshold. To add a detector, write a function and one entry in DETECTORS, and add its action
and its threshold to the settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fakevllm.guard.trends import NUM_ERRORS, Trend

ENTROPY, REWARD, LENGTH = "entropy", "reward_mean", "response_length_mean"
"""Metrics of a step in the run log."""
IDENTICAL, EQUAL, REFUSALS = "identical_siblings", "equal_answers", "refusals"
TOOL_ERRORS, AGREEMENT = "tool_errors", "judge_agreement"
"""Figures of `answer_figures`."""
WITHOUT_FIRST_STEPS = frozenset({AGREEMENT})
"""Figures that are compared with a fixed threshold, and not with those of the first steps. When all
answers get the same reward, a step has no agreement any more, so the detector must not wait."""
HELD_OUT, REWARD_THEN = "held_out", "reward_at_held_out"
"""Mean reward on held-out rows, and mean training reward at the time of that evaluation, both as a
share of the width of the reward range. These trends have one first and one latest value."""
HELD_OUT_ERROR, REWARD_THEN_ERROR = "held_out_error", "reward_at_held_out_error"
"""The standard errors of these two."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a detector sees at one step."""

    severity: float
    """0 without a change, and 1 at the threshold."""
    is_certain: bool
    """Whether the change is larger than chance explains."""
    value: float
    """The value that is compared with the threshold."""
    text: str
    """The values in words, for a message."""


@dataclass(frozen=True, slots=True)
class Detector:
    """One entry of the table."""

    figures: tuple[str, ...]
    """Figures that the detector needs."""
    read: Callable[[Mapping[str, Trend], float], Reading]
    """Function that gets the trends of the figures and the threshold."""
    remedy: str
    """What the user can do, in one sentence."""


def _entropy_collapse(trends: Mapping[str, Trend], threshold: float) -> Reading:
    entropy = trends[ENTROPY]
    ratio = entropy.latest_mean / entropy.first_mean if entropy.first_mean > 0 else 1.0
    text = f"the entropy of the tokens is {entropy.latest_mean:.3g}, {ratio:.2f} times that of the "
    text += f"first steps ({entropy.first_mean:.3g})"
    return Reading((1 - ratio) / (1 - threshold), entropy.is_certain, ratio, text)


def _length_growth(trends: Mapping[str, Trend], threshold: float) -> Reading:
    length, reward = trends[LENGTH], trends[REWARD]
    ratio = length.latest_mean / length.first_mean if length.first_mean > 0 else 1.0
    text = f"answers have {length.latest_mean:.0f} tokens, {ratio:.2f} times as many as in the "
    text += f"first steps ({length.first_mean:.0f}), while the mean reward rose from "
    text += f"{reward.first_mean:.3f} to {reward.latest_mean:.3f}"
    rises = reward.change > 0 and reward.is_certain
    return Reading((ratio - 1) / (threshold - 1), length.is_certain and rises, ratio, text)


def _rise(figure: str, subject: str) -> Callable[[Mapping[str, Trend], float], Reading]:
    """Return a function that reads how far a share has risen. `subject` says of what."""

    def read(trends: Mapping[str, Trend], threshold: float) -> Reading:
        share = trends[figure]
        text = f"{share.latest_mean:.0%} of {subject}, {share.first_mean:.0%} in the first steps"
        return Reading(share.change / threshold, share.is_certain, share.change, text)

    return read


def _second_judge(trends: Mapping[str, Trend], threshold: float) -> Reading:
    agreement = trends[AGREEMENT]
    share = agreement.latest_mean
    text = f"the second judge puts {share:.0%} of the pairs of siblings in the order of the rewards"
    # The alarm ends at this share, so a certain alarm is this far from its end.
    end = 1 - (1 - threshold) / 2
    is_certain = end - share > NUM_ERRORS * agreement.latest_error
    return Reading((1 - share) / (1 - threshold), is_certain, share, text)


def _held_out_gap(trends: Mapping[str, Trend], threshold: float) -> Reading:
    held_out, reward = trends[HELD_OUT], trends[REWARD_THEN]
    gap = reward.change - max(held_out.change, 0.0)
    errors = (trends[HELD_OUT_ERROR], trends[REWARD_THEN_ERROR])
    error = math.hypot(*(value for one in errors for value in (one.first_mean, one.latest_mean)))
    text = f"the mean training reward rose by {reward.change:.3f} of the reward range, and that on "
    text += f"held-out rows changed by {held_out.change:+.3f}"
    return Reading(gap / threshold, gap > NUM_ERRORS_HELD_OUT * error, gap, text)


NUM_ERRORS_HELD_OUT = 3.0
"""Number of standard errors for the gap to held-out rows. It is smaller than NUM_ERRORS, because
there is one look for each evaluation and not for each step."""
_READ_GROUPS = "read some groups of the latest steps in the console, and see what the hook rewards"

DETECTORS: Mapping[str, Detector] = {
    "entropy_collapse": Detector(
        (ENTROPY,),
        _entropy_collapse,
        "The model samples nearly the same tokens each time, and learns little more: lower job.lr, "
        "raise job.entropy_coeff, or stop here.",
    ),
    "length_growth": Detector(
        (LENGTH, REWARD),
        _length_growth,
        f"The hook may reward length: {_READ_GROUPS}, or set job.overlong_buffer_len.",
    ),
    "identical_siblings": Detector(
        (IDENTICAL,),
        _rise(IDENTICAL, "the pairs of siblings are nearly identical"),
        "Siblings that are alike teach nothing: raise job.entropy_coeff or the temperature, or go "
        "back to an earlier version.",
    ),
    "equal_answers": Detector(
        (EQUAL,),
        _rise(EQUAL, "the answers were given to another question too"),
        f"The model may have found one answer that the hook always rewards: {_READ_GROUPS}.",
    ),
    "refusals": Detector(
        (REFUSALS,),
        _rise(REFUSALS, "the answers refuse or ask the user to be clearer"),
        f"The hook may reward answers that avoid the question: {_READ_GROUPS}.",
    ),
    "tool_errors": Detector(
        (TOOL_ERRORS,),
        _rise(TOOL_ERRORS, "the tool calls are broken"),
        "Let the hook give broken tool calls a low reward (reward.failure_floor), or go back to an "
        "earlier version.",
    ),
    "second_judge": Detector(
        (AGREEMENT,),
        _second_judge,
        f"The rewards may be gamed: {_READ_GROUPS}.",
    ),
    "held_out_gap": Detector(
        (HELD_OUT, REWARD_THEN, HELD_OUT_ERROR, REWARD_THEN_ERROR),
        _held_out_gap,
        "The model learns the training requests by heart, or the hook is gamed on them: stop here, "
        "or train on more different requests.",
    ),
}
"""All detectors by name. The name is also that of the detector's action and of its threshold."""
