"""Reinforcement learning in plain Python: from rewards to advantages, and what a loss is the mean
of.

    outcome.py         what estimators read
    group_relative.py  grpo, rloo, opo, grpo_passk, gpg
    whitened.py        reinforce_plus_plus, reinforce_plus_plus_baseline
    remax.py           against a greedy answer
    shaping.py         KL in reward, overlong answers, ties
    staleness.py       calls of old weights
    loss_units.py      what counts as one sequence, and each call's share of the step

A new estimator is a function and one entry in ESTIMATORS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fakevllm_server.algorithms.group_relative import gpg, grpo, grpo_passk, opo, rloo
from fakevllm_server.algorithms.outcome import AdvantageSpec, Outcome
from fakevllm_server.algorithms.remax import remax
from fakevllm_server.algorithms.whitened import reinforce_plus_plus, reinforce_plus_plus_baseline

Estimator = Callable[[Sequence[Outcome], AdvantageSpec], list[list[float]]]

ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
    "grpo_passk": grpo_passk,
    "gpg": gpg,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
}
"""TrainJob.algorithm, as verl's `adv_estimator` spells it -> all scored episodes of a step ->
an advantage for each trained token of each."""
NEEDS_GREEDY = frozenset({"remax"})
"""Algorithms that compare with an answer sampled at temperature 0."""
