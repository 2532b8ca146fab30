"""Made-up runs for tests of the detectors: the figures of each step, with noise from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from fakevllm.guard.detector_bank import Alarm, DetectorBank, GuardRules
from fakevllm.guard.detectors import DETECTORS

NUM_STEPS = 120
ONSET = 60
"""First step with trouble."""
THRESHOLDS = {
    "entropy_collapse": 0.1,
    "length_growth": 1.5,
    "identical_siblings": 0.3,
    "equal_answers": 0.2,
    "refusals": 0.2,
    "tool_errors": 0.1,
    "second_judge": 0.5,
    "held_out_gap": 0.1,
}
RULES = GuardRules(THRESHOLDS)
Figures = dict[str, float]

TROUBLES: dict[str, Figures] = {
    "entropy_collapse": {"entropy": 0.04},
    "length_growth": {"response_length_mean": 420.0, "reward_mean": 0.8},
    "identical_siblings": {"identical_siblings": 0.7},
    "equal_answers": {"equal_answers": 0.5},
    "refusals": {"refusals": 0.5},
    "tool_errors": {"tool_errors": 0.4},
    "second_judge": {"judge_agreement": 0.3},
}
"""By detector: the means of the figures once the trouble is there."""


def healthy(step: int, noise: random.Random) -> Figures:
    """Return the figures of a step of an honest run: the reward rises, the entropy falls by half,
    the answers become a little longer, and all figures have noise."""
    share = step / NUM_STEPS
    means = {
        "entropy": 1.0 - 0.5 * share,
        "reward_mean": 0.4 + 0.3 * share,
        "response_length_mean": 200.0 + 40.0 * share,
        "identical_siblings": 0.05 + 0.1 * share,
        "equal_answers": 0.02,
        "refusals": 0.05,
        "tool_errors": 0.05,
        "judge_agreement": 0.85,
    }
    return with_noise(means, noise)


def with_noise(means: Figures, noise: random.Random) -> Figures:
    """Return the figures with noise of a tenth of their size."""
    return {name: mean * (1 + noise.gauss(0, 0.1)) for name, mean in means.items()}


def with_trouble(detector: str) -> Callable[[int, random.Random], Figures]:
    """Return the function that gives the figures of a step of a run with trouble after ONSET."""

    def figures(step: int, noise: random.Random) -> Figures:
        own = healthy(step, noise)
        return own if step < ONSET else own | with_noise(TROUBLES[detector], noise)

    return figures


def run(
    figures: Callable[[int, random.Random], Figures],
    seed: int = 0,
    steps: Sequence[int] = range(NUM_STEPS),
    bank: DetectorBank | None = None,
) -> list[Alarm]:
    """Feed the detectors with a run, and return all alarms."""
    noise, bank = random.Random(seed), bank or DetectorBank(RULES)
    return [
        alarm for step in steps for alarm in bank.step_trained(step, step + 1, figures(step, noise))
    ]


assert set(THRESHOLDS) == set(DETECTORS), "each detector has a threshold"
