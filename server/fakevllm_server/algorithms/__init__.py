"""Reinforcement learning algorithms in plain Python: rewards, advantages and weights in the loss.

    advantage_input.py         input of the advantage estimators, and their shared arithmetic
    group_relative.py  grpo, rloo, opo, grpo_passk, gpg: compare with the episode's group
    whitened.py        reinforce_plus_plus, reinforce_plus_plus_baseline: normalize over the step
    remax.py           remax: compare with a greedy answer
    reward_penalties.py         penalties for KL and for overlong answers; ties
    staleness.py       drop calls that old weights sampled
    loss_sequences.py      group calls into sequences, and weight each call in the step's loss

A new estimator is a function and one entry in ESTIMATORS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fakevllm_server.algorithms.advantage_input import AdvantageSpec, Outcome
from fakevllm_server.algorithms.group_relative import gpg, grpo, grpo_passk, opo, rloo
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
"""Advantage estimators by `TrainJob.algorithm`, with verl's names (`adv_estimator`). An estimator
takes all scored episodes of a step and returns, for each episode, one advantage per trained
token."""
NEEDS_GREEDY = frozenset({"remax"})
"""Algorithms that need an answer sampled at temperature 0 in each group."""
