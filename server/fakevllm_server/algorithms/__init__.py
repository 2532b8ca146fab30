"""Reinforcement learning algorithms in plain Python: rewards, advantages, and weights in the loss.

    advantage_input.py   the input of the advantage estimators, and the arithmetic that they share
    group_relative.py    grpo, rloo, opo, grpo_passk and gpg compare an episode with its group
    whitened.py          reinforce_plus_plus and reinforce_plus_plus_baseline normalize over a step
    remax.py             remax subtracts the reward of an answer sampled at temperature 0
    reward_penalties.py  KL and overlong penalties, and the check whether all rewards are equal
    staleness.py         removal of calls that were sampled with outdated weights
    loss_sequences.py    grouping of calls into sequences, and the weight of each call in the loss
    sibling_demonstrations.py, mismatched_pairs.py
                         answers of a group as demonstrations for the losses sft, dpo and kto

A call is one model call: a prompt with the sampled response. An episode is one run of an agent. It
has one or more calls and gets one reward. A group is a set of episodes for the same request or
task. To add an advantage estimator, write its function and add it to ESTIMATORS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fakevllm_server.algorithms.advantage_input import AdvantageSpec, Outcome
from fakevllm_server.algorithms.group_relative import gpg, grpo, grpo_passk, opo, rloo
from fakevllm_server.algorithms.remax import remax
from fakevllm_server.algorithms.whitened import reinforce_plus_plus, reinforce_plus_plus_baseline
from fakevllm_server.types.number_arrays import FloatArray

Estimator = Callable[[Sequence[Outcome], AdvantageSpec], list[FloatArray]]

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
"""Advantage estimators by `TrainJob.algorithm`. The names are those of verl's `adv_estimator`. An
estimator takes all scored episodes of a step and returns, for each episode, one advantage per
trained token."""
NEEDS_GREEDY = frozenset({"remax"})
"""Algorithms for which each group must contain an answer that was sampled at temperature 0."""
